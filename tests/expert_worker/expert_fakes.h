#pragma once

// Routed experts in memory, for tests of the store and the block: random weights, and the sums that
// they must give, in double.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "common/tensor/convert.h"
#include "expert_worker/engine/expert_source.h"
#include "expert_worker/engine/store_manifest.h"

namespace tandem::expert {

struct FakeShape {
  uint32_t layers = 2;
  std::vector<uint32_t> moe_layers = {1};
  uint32_t experts = 4;
  uint32_t hidden = 40;
  uint32_t intermediate = 24;
  DType dtype = DType::kF32;
  bool biases = false;
  kernels::SwigluClamp activation = {};
};

// What ExpectedBlock reads of a source: its exact values.
class KnownExperts : public ExpertSource {
 public:
  explicit KnownExperts(const FakeShape& shape) : shape_(shape) {}
  const FakeShape& shape() const { return shape_; }
  // Row-major part: gate, up [intermediate, hidden], down [hidden, intermediate].
  virtual const float* part(int layer, int expert, ExpertPart which) const = 0;
  // [intermediate] or [hidden]; null without biases.
  virtual const float* bias(int /*layer*/, int /*expert*/, ExpertPart /*which*/) const {
    return nullptr;
  }

  StoreSpec Spec(uint32_t quantum, SegmentRange range, uint64_t model_hash = 77) const {
    StoreSpec spec;
    spec.model_hash = model_hash;
    const int layer = static_cast<int>(shape_.moe_layers[0]);
    spec.formats = {{format({layer, 0, ExpertPart::kGate}), format({layer, 0, ExpertPart::kDown})}};
    spec.layers = shape_.layers;
    spec.moe_layers = shape_.moe_layers;
    spec.experts = shape_.experts;
    spec.hidden = shape_.hidden;
    spec.intermediate = shape_.intermediate;
    spec.biases = shape_.biases;
    spec.activation = shape_.activation;
    spec.quantum = quantum;
    spec.segments = range;
    return spec;
  }
  uint32_t quantum() const { return ChooseQuantum(shape_.intermediate, Spec(4, {0, 0}).formats); }
  SegmentRange all() const { return {0, SegmentCount(shape_.intermediate, quantum())}; }

 protected:
  const FakeShape shape_;
};

class FakeExperts final : public KnownExperts {
 public:
  FakeExperts(const FakeShape& shape, uint32_t seed) : KnownExperts(shape) {
    const size_t count = size_t{shape.layers} * shape.experts * 3;
    weights_.resize(count * part_elements());
    biases_.resize(count * longest());
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal(0.0f, 0.2f);
    for (float& w : weights_) {
      w = normal(rng);
      if (shape.dtype == DType::kBF16) w = Bf16ToF32(F32ToBf16(w));
    }
    for (float& b : biases_) b = normal(rng);
  }

  MatrixFormat format(const ExpertMatrix& /*matrix*/) const override {
    return {shape_.dtype == DType::kBF16 ? WeightFormat::kBf16 : WeightFormat::kF32, 0};
  }
  const float* part(int layer, int expert, ExpertPart which) const override {
    return weights_.data() + Index(layer, expert, which) * part_elements();
  }
  float* mutable_part(int layer, int expert, ExpertPart which) {
    return const_cast<float*>(part(layer, expert, which));
  }
  const float* bias(int layer, int expert, ExpertPart which) const override {
    return shape_.biases ? biases_.data() + Index(layer, expert, which) * longest() : nullptr;
  }
  float* mutable_bias(int layer, int expert, ExpertPart which) {
    return const_cast<float*>(bias(layer, expert, which));
  }

  absl::Status ReadElements(const ExpertMatrix& m, Range rows, Range cols, WeightFormat plain,
                            void* out) const override {
    ++reads;
    if (fail_expert == m.expert) return absl::DataLossError("a bad tensor");
    const int64_t stride = m.part == ExpertPart::kDown ? shape_.intermediate : shape_.hidden;
    const float* from = part(m.layer, m.expert, m.part);
    size_t i = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int64_t c = cols.begin; c < cols.end; ++c, ++i) {
        const float value = from[r * stride + c];
        if (plain == WeightFormat::kBf16) {
          static_cast<uint16_t*>(out)[i] = F32ToBf16(value);
        } else {
          static_cast<float*>(out)[i] = value;
        }
      }
    }
    return absl::OkStatus();
  }
  absl::Status ReadCodes(const ExpertMatrix& /*matrix*/, Range /*rows*/, Range /*cols*/,
                         uint8_t* /*codes*/, GroupParameters* /*groups*/) const override {
    return absl::InternalError("plain experts have no codes");
  }
  absl::Status ReadBias(const ExpertMatrix& m, Range rows, float* out) const override {
    const float* from = bias(m.layer, m.expert, m.part) + rows.begin;
    std::memcpy(out, from, static_cast<size_t>(rows.size()) * sizeof(float));
    return absl::OkStatus();
  }

  mutable std::atomic<int> reads{0};
  int fail_expert = -1;

 private:
  size_t part_elements() const { return size_t{shape_.hidden} * shape_.intermediate; }
  size_t longest() const { return std::max(shape_.hidden, shape_.intermediate); }
  size_t Index(int layer, int expert, ExpertPart which) const {
    return (static_cast<size_t>(layer) * shape_.experts + static_cast<size_t>(expert)) * 3 +
           static_cast<size_t>(which);
  }

  std::vector<float> weights_;
  std::vector<float> biases_;
};

inline double ExpectedActivation(const kernels::SwigluClamp& clamp, double g, double u) {
  if (clamp.limit == 0) return g / (1 + std::exp(-g)) * u;
  const auto limit = static_cast<double>(clamp.limit);
  g = std::min(g, limit);
  u = std::min(std::max(u, -limit), limit);
  return g / (1 + std::exp(-static_cast<double>(clamp.alpha) * g)) *
         (u + static_cast<double>(clamp.up_offset));
}

// out[rows, hidden] in double; x F32.
inline std::vector<double> ExpectedBlock(const KnownExperts& experts, int layer,
                                         const std::vector<float>& x,
                                         const std::vector<uint16_t>& ids,
                                         const std::vector<float>& weights, uint32_t top_k) {
  const size_t hidden = experts.shape().hidden;
  const size_t intermediate = experts.shape().intermediate;
  std::vector<double> out(ids.size() / top_k * hidden, 0.0);
  const auto dot = [](const float* a, const float* b, size_t n) {
    double sum = 0;
    for (size_t j = 0; j < n; ++j) sum += static_cast<double>(a[j]) * static_cast<double>(b[j]);
    return sum;
  };
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= experts.shape().experts) continue;
    const float* row = x.data() + i / top_k * hidden;
    const auto weight = static_cast<double>(weights[i]);
    const auto part = [&](ExpertPart p) { return experts.part(layer, ids[i], p); };
    const auto bias = [&](ExpertPart p, size_t at) {
      const float* b = experts.bias(layer, ids[i], p);
      return b == nullptr ? 0.0 : static_cast<double>(b[at]);
    };
    double* sums = out.data() + i / top_k * hidden;
    for (size_t f = 0; f < intermediate; ++f) {
      const double g =
          bias(ExpertPart::kGate, f) + dot(row, part(ExpertPart::kGate) + f * hidden, hidden);
      const double u =
          bias(ExpertPart::kUp, f) + dot(row, part(ExpertPart::kUp) + f * hidden, hidden);
      const double act = ExpectedActivation(experts.shape().activation, g, u);
      for (size_t o = 0; o < hidden; ++o) {
        sums[o] +=
            weight * act * static_cast<double>(part(ExpertPart::kDown)[o * intermediate + f]);
      }
    }
    for (size_t o = 0; o < hidden; ++o) sums[o] += weight * bias(ExpertPart::kDown, o);
  }
  return out;
}

}  // namespace tandem::expert
