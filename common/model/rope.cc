#include "common/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

constexpr double kMaxFactor = 1e4;
constexpr double kMaxContext = 1e9;

std::optional<RopeType> TypeFromName(std::string_view name) {
  if (name == "default" || name.empty()) return RopeType::kPlain;
  if (name == "linear") return RopeType::kLinear;
  if (name == "llama3") return RopeType::kLlama3;
  if (name == "yarn") return RopeType::kYarn;
  return std::nullopt;
}

// `type` is the older spelling of `rope_type`; files with both exist.
RopeType ReadType(HubConfig& scaling) {
  const std::string newer = scaling.StringOr("rope_type", "");
  const std::string older = scaling.StringOr("type", "");
  if (!newer.empty() && !older.empty() && newer != older) {
    scaling.Fail("rope_type", absl::StrCat("is ", QuoteForMessage(newer), " while 'type' is ",
                                           QuoteForMessage(older)));
  }
  const std::string& name = newer.empty() ? older : newer;
  const std::optional<RopeType> type = TypeFromName(name);
  if (!type) {
    scaling.Fail(newer.empty() ? "type" : "rope_type",
                 absl::StrCat("is ", QuoteForMessage(name),
                              ", supported are default, linear, llama3, yarn"));
  }
  return type.value_or(RopeType::kPlain);
}

void ReadScaling(HubConfig& scaling, double max_context, RopeConfig& rope) {
  rope.type = ReadType(scaling);
  rope.theta = scaling.RealOr("rope_theta", rope.theta, 0, 1e12);
  if (rope.type == RopeType::kPlain) return;
  rope.original_context =
      scaling.RealOr("original_max_position_embeddings", max_context, 0, kMaxContext);
  if (rope.type == RopeType::kYarn && !scaling.Has("factor")) {
    rope.factor = std::max(1.0, max_context / rope.original_context);
  } else {
    rope.factor = scaling.Real("factor", 0, kMaxFactor);
  }
  if (rope.type == RopeType::kLlama3) {
    rope.low_freq_factor = scaling.Real("low_freq_factor", 0, kMaxFactor);
    rope.high_freq_factor = scaling.Real("high_freq_factor", 0, kMaxFactor);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      scaling.Fail("high_freq_factor", "is not above low_freq_factor");
    }
  }
  if (rope.type == RopeType::kYarn) {
    rope.beta_fast = scaling.RealOr("beta_fast", 32, 0, kMaxFactor);
    rope.beta_slow = scaling.RealOr("beta_slow", 1, 0, kMaxFactor);
    rope.mscale = scaling.RealOr("mscale", 0, -1e-9, kMaxFactor);
    rope.mscale_all_dim = scaling.RealOr("mscale_all_dim", 0, -1e-9, kMaxFactor);
    rope.truncate = scaling.BoolOr("truncate", true);
    rope.attention_factor = scaling.OptionalReal("attention_factor", 0, kMaxFactor);
  }
}

void ApplyLlama3(const RopeConfig& rope, std::vector<double>& inv_freq) {
  const double low_wavelength = rope.original_context / rope.low_freq_factor;
  const double high_wavelength = rope.original_context / rope.high_freq_factor;
  for (double& inv : inv_freq) {
    const double wavelength = 2 * std::numbers::pi / inv;
    if (wavelength > low_wavelength) {
      inv /= rope.factor;
    } else if (wavelength >= high_wavelength) {
      const double t = (rope.original_context / wavelength - rope.low_freq_factor) /
                       (rope.high_freq_factor - rope.low_freq_factor);
      inv = (1 - t) * inv / rope.factor + t * inv;
    }
  }
}

void ApplyYarn(const RopeConfig& rope, int rotary_dims, std::vector<double>& inv_freq) {
  // The dimension whose wavelength makes `rotations` turns over the original context.
  const auto dimension = [&](double rotations) {
    return rotary_dims * std::log(rope.original_context / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = dimension(rope.beta_fast);
  double high = dimension(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, rotary_dims - 1.0);
  if (low == high) high += 0.001;
  for (size_t j = 0; j < inv_freq.size(); ++j) {
    const double ramp = std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
    inv_freq[j] = inv_freq[j] / rope.factor * ramp + inv_freq[j] * (1 - ramp);
  }
}

double YarnAttentionFactor(const RopeConfig& rope) {
  if (rope.attention_factor) return *rope.attention_factor;
  if (rope.mscale > 0 && rope.mscale_all_dim > 0) {
    return YarnMscale(rope.factor, rope.mscale) / YarnMscale(rope.factor, rope.mscale_all_dim);
  }
  return YarnMscale(rope.factor, 1);
}

}  // namespace

RopeConfig ReadRopeConfig(HubConfig& config, double theta_absent) {
  RopeConfig rope;
  rope.theta = config.RealOr("rope_theta", theta_absent, 0, 1e12);
  const double max_context = config.IntOr("max_position_embeddings", 2048, {.max = 1 << 30});
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const nlohmann::json* object = config.Object(key);
    if (object == nullptr) continue;
    HubConfig scaling(*object, absl::StrCat(config.where(), ": ", key));
    ReadScaling(scaling, max_context, rope);
    config.Adopt(scaling.status());
    break;
  }
  if (rope.theta <= 1) config.Fail("rope_theta", "is not above 1");
  return rope;
}

RopeTable MakeRopeTable(const RopeConfig& rope, int rotary_dims) {
  TANDEM_CHECK(rotary_dims > 0 && rotary_dims % 2 == 0);
  std::vector<double> inv_freq(static_cast<size_t>(rotary_dims / 2));
  for (size_t j = 0; j < inv_freq.size(); ++j) {
    inv_freq[j] = std::pow(rope.theta, -2.0 * static_cast<double>(j) / rotary_dims);
  }
  RopeTable table;
  switch (rope.type) {
    case RopeType::kPlain:
      break;
    case RopeType::kLinear:
      for (double& inv : inv_freq) inv /= rope.factor;
      break;
    case RopeType::kLlama3:
      ApplyLlama3(rope, inv_freq);
      break;
    case RopeType::kYarn:
      ApplyYarn(rope, rotary_dims, inv_freq);
      table.attention_factor = static_cast<float>(YarnAttentionFactor(rope));
      break;
  }
  table.inv_freq.assign(inv_freq.begin(), inv_freq.end());
  return table;
}

double YarnMscale(double factor, double scale) {
  return factor <= 1 ? 1 : 0.1 * scale * std::log(factor) + 1;
}

double YarnSoftmaxFactor(const RopeConfig& rope) {
  if (rope.type != RopeType::kYarn || rope.mscale_all_dim <= 0) return 1;
  const double m = YarnMscale(rope.factor, rope.mscale_all_dim);
  return m * m;
}

int ContextTokens(const RopeConfig& rope, int max_position_embeddings) {
  if (rope.type != RopeType::kYarn) return max_position_embeddings;
  const double extended = std::min(rope.original_context * rope.factor, double{1 << 30});
  return std::max(max_position_embeddings, static_cast<int>(extended));
}

}  // namespace tandem
