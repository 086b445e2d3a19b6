#pragma once

// The routed experts of a checkpoint, by (layer, expert, part), whatever their tensor layout and
// quantization: the seam between common/model and whoever packs experts (expert_worker/engine).
//
// Thread safety: immutable; any thread may read. Ownership: views into the Checkpoint, which must
// outlive it. Errors name file and tensor.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/model/model_spec.h"
#include "common/tensor/dtype.h"

namespace tandem {

enum class ExpertPart : uint8_t { kGate = 0, kUp = 1, kDown = 2 };

class ExpertTensors {
 public:
  // Finds every routed expert's three matrices and checks their shapes; one error names the first
  // that is missing. A model without routed experts gives an empty set.
  static absl::StatusOr<ExpertTensors> Create(const Checkpoint& checkpoint, const ModelSpec& spec);

  // Reads rows x cols, row-major without gaps, as `dtype` (kF32 or kBF16) into `out`.
  // Shapes: gate and up [intermediate, hidden], down [hidden, intermediate].
  absl::Status Read(int layer, int expert, ExpertPart part, Range rows, Range cols, DType dtype,
                    void* out) const;

  // kBF16 when every expert of the model is stored as BF16; else kF32, since an F16 or a scaled FP8
  // value need not fit BF16.
  DType native_dtype() const { return native_dtype_; }
  int64_t hidden() const { return hidden_; }
  int64_t intermediate() const { return intermediate_; }
  int experts() const { return experts_; }
  bool has_layer(int layer) const;
  // As the checkpoint holds it. REQUIRES: has_layer(layer), 0 <= expert < experts().
  const WeightMatrix& matrix(int layer, int expert, ExpertPart part) const {
    return layers_[static_cast<size_t>(layer)]
                  [static_cast<size_t>(expert) * 3 + static_cast<size_t>(part)];
  }

 private:
  ExpertTensors() = default;

  // One entry a layer, empty for dense layers; [expert * 3 + part] within.
  std::vector<std::vector<WeightMatrix>> layers_;
  DType native_dtype_ = DType::kBF16;
  int64_t hidden_ = 0;
  int64_t intermediate_ = 0;
  int experts_ = 0;
};

}  // namespace tandem
