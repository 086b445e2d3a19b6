#include "gpu_worker/hot_experts/expert_counts.h"

#include <algorithm>
#include <cmath>

#include "common/base/check.h"

namespace tandem::gpu {
namespace {

// Far from F32's largest number, and a pick of long ago is far below one of today.
constexpr float kLargestUnit = 1e12F;

}  // namespace

ExpertCounts::ExpertCounts(const Options& options)
    : options_(options), growth_(static_cast<float>(std::exp2(1.0 / options.half_life_steps))) {
  TANDEM_CHECK(options.layers > 0 && options.experts > 0);
  TANDEM_CHECK(options.half_life_steps > 0);
  values_.assign(static_cast<size_t>(options.layers) * static_cast<size_t>(options.experts), 0.0F);
}

void ExpertCounts::Add(int layer, std::span<const uint16_t> picks) {
  TANDEM_DCHECK(layer < options_.layers);
  float* const counts = values_.data() + static_cast<ptrdiff_t>(layer) * options_.experts;
  for (const uint16_t id : picks) {
    if (id < options_.experts) counts[id] += unit_;
  }
}

void ExpertCounts::EndStep() {
  ++steps_;
  unit_ *= growth_;
  if (unit_ <= kLargestUnit) return;
  for (float& value : values_) value /= unit_;
  unit_ = 1;
}

float ExpertCounts::count(int layer, int expert) const {
  return values_[static_cast<size_t>(layer) * static_cast<size_t>(options_.experts) +
                 static_cast<size_t>(expert)] /
         unit_;
}

void ExpertCounts::Assign(const ExpertCounts& other) {
  TANDEM_DCHECK(other.values_.size() == values_.size());
  std::copy(other.values_.begin(), other.values_.end(), values_.begin());
  unit_ = other.unit_;
  steps_ = other.steps_;
}

void ExpertCounts::Restore(std::span<const float> picks, uint64_t steps) {
  TANDEM_CHECK(picks.size() == values_.size());
  std::copy(picks.begin(), picks.end(), values_.begin());
  unit_ = 1;
  steps_ = steps;
}

}  // namespace tandem::gpu
