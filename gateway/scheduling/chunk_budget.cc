#include "gateway/scheduling/chunk_budget.h"

#include <algorithm>

namespace tandem::gateway {
namespace {

// Moving averages follow a change in about ten steps and ignore a single outlier.
constexpr double kWeight = 0.2;

void Mix(double sample, double* average) {
  *average = *average == 0 ? sample : *average + kWeight * (sample - *average);
}

}  // namespace

uint32_t ChunkBudget::Tokens(uint32_t decodes) const {
  if (options_.fixed_tokens > 0) return std::min(options_.fixed_tokens, options_.max_tokens);
  if (decodes == 0) return options_.max_tokens;
  const double low = std::min(options_.min_tokens, options_.max_tokens);
  const auto bounded = [&](double tokens) {
    return static_cast<uint32_t>(std::clamp(tokens, low, static_cast<double>(options_.max_tokens)));
  };
  if (advised_rows_ > 0) {
    return bounded(static_cast<double>(advised_rows_) - static_cast<double>(decodes));
  }
  if (prompt_token_ns_ <= 0) return std::min(options_.first_tokens, options_.max_tokens);
  const auto limit = static_cast<double>(limit_ns());
  return bounded((limit - decode_step_ns_) / prompt_token_ns_);
}

int64_t ChunkBudget::limit_ns() const {
  if (options_.fixed_tokens > 0) return 0;
  return std::max(options_.target_ns, static_cast<int64_t>(2 * decode_step_ns_));
}

void ChunkBudget::Advise(uint32_t decodes, uint32_t prompt_tokens) {
  advised_rows_ = prompt_tokens == 0 ? 0 : decodes + prompt_tokens;
}

void ChunkBudget::Observe(uint32_t decodes, uint32_t prompt_tokens, int64_t duration_ns) {
  const double duration = static_cast<double>(std::max<int64_t>(duration_ns, 1));
  if (prompt_tokens == 0) {
    if (decodes > 0) Mix(duration, &decode_step_ns_);
    return;
  }
  const double base = decodes > 0 ? decode_step_ns_ : 0;
  Mix(std::max(duration - base, 1.0) / prompt_tokens, &prompt_token_ns_);
}

}  // namespace tandem::gateway
