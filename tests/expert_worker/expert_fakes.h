#pragma once

// Routed experts in memory, for tests of the store and the block: random weights, and the sums that
// they must give, in double.

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
};

class FakeExperts final : public ExpertSource {
 public:
  FakeExperts(const FakeShape& shape, uint32_t seed) : shape_(shape) {
    const size_t count = size_t{shape.layers} * shape.experts * 3 * part_elements();
    weights_.resize(count);
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal(0.0f, 0.2f);
    for (float& w : weights_) {
      w = normal(rng);
      if (shape.dtype == DType::kBF16) w = Bf16ToF32(F32ToBf16(w));
    }
  }

  const FakeShape& shape() const { return shape_; }
  DType native_dtype() const override { return shape_.dtype; }

  // Row-major part: gate, up [intermediate, hidden], down [hidden, intermediate].
  const float* part(int layer, int expert, ExpertPart which) const {
    const size_t index =
        (static_cast<size_t>(layer) * shape_.experts + static_cast<size_t>(expert)) * 3 +
        static_cast<size_t>(which);
    return weights_.data() + index * part_elements();
  }
  float* mutable_part(int layer, int expert, ExpertPart which) {
    return const_cast<float*>(part(layer, expert, which));
  }

  absl::Status Read(int layer, int expert, ExpertPart which, Range rows, Range cols, DType dtype,
                    void* out) const override {
    ++reads;
    if (fail_expert == expert) return absl::DataLossError("a bad tensor");
    const int64_t stride = which == ExpertPart::kDown ? shape_.intermediate : shape_.hidden;
    const float* from = part(layer, expert, which);
    size_t i = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int64_t c = cols.begin; c < cols.end; ++c, ++i) {
        const float value = from[r * stride + c];
        if (dtype == DType::kBF16) {
          static_cast<uint16_t*>(out)[i] = F32ToBf16(value);
        } else {
          static_cast<float*>(out)[i] = value;
        }
      }
    }
    return absl::OkStatus();
  }

  StoreSpec Spec(uint32_t quantum, SegmentRange range, uint64_t model_hash = 77) const {
    StoreSpec spec;
    spec.model_hash = model_hash;
    spec.format = shape_.dtype == DType::kBF16 ? WeightFormat::kBf16 : WeightFormat::kF32;
    spec.layers = shape_.layers;
    spec.moe_layers = shape_.moe_layers;
    spec.experts = shape_.experts;
    spec.hidden = shape_.hidden;
    spec.intermediate = shape_.intermediate;
    spec.quantum = quantum;
    spec.segments = range;
    return spec;
  }

  mutable std::atomic<int> reads{0};
  int fail_expert = -1;

 private:
  size_t part_elements() const { return size_t{shape_.hidden} * shape_.intermediate; }

  FakeShape shape_;
  std::vector<float> weights_;
};

// out[rows, hidden] in double; x F32.
inline std::vector<double> ExactBlock(const FakeExperts& experts, int layer,
                                      const std::vector<float>& x, const std::vector<uint16_t>& ids,
                                      const std::vector<float>& weights, uint32_t top_k) {
  const size_t hidden = experts.shape().hidden;
  const size_t intermediate = experts.shape().intermediate;
  const size_t rows = ids.size() / top_k;
  std::vector<double> out(rows * hidden, 0.0);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == 0xFFFF) continue;
    const float* row = x.data() + i / top_k * hidden;
    const float* gate = experts.part(layer, ids[i], ExpertPart::kGate);
    const float* up = experts.part(layer, ids[i], ExpertPart::kUp);
    const float* down = experts.part(layer, ids[i], ExpertPart::kDown);
    for (size_t f = 0; f < intermediate; ++f) {
      double g = 0, u = 0;
      for (size_t j = 0; j < hidden; ++j) {
        g += static_cast<double>(row[j]) * static_cast<double>(gate[f * hidden + j]);
        u += static_cast<double>(row[j]) * static_cast<double>(up[f * hidden + j]);
      }
      const double act = g / (1 + std::exp(-g)) * u;
      for (size_t o = 0; o < hidden; ++o) {
        out[i / top_k * hidden + o] +=
            static_cast<double>(weights[i]) * act * static_cast<double>(down[o * intermediate + f]);
      }
    }
  }
  return out;
}

}  // namespace tandem::expert
