#pragma once

// Where the weights of routed experts come from while a store is filled: a checkpoint, or memory in
// tests. Implementations are immutable; any thread may read.

#include "absl/status/status.h"
#include "common/model/expert_tensors.h"

namespace tandem::expert {

class ExpertSource {
 public:
  virtual ~ExpertSource() = default;

  // kBF16 or kF32: what every expert fits exactly.
  virtual DType native_dtype() const = 0;
  // Rows x cols, row-major without gaps, as `dtype` into `out`. Shapes: gate and up
  // [intermediate, hidden], down [hidden, intermediate]. Errors name file and tensor.
  virtual absl::Status Read(int layer, int expert, ExpertPart part, Range rows, Range cols,
                            DType dtype, void* out) const = 0;
};

// The experts of a checkpoint. `tensors` must outlive it.
class CheckpointExperts final : public ExpertSource {
 public:
  explicit CheckpointExperts(const ExpertTensors* tensors) : tensors_(tensors) {}

  DType native_dtype() const override { return tensors_->native_dtype(); }
  absl::Status Read(int layer, int expert, ExpertPart part, Range rows, Range cols, DType dtype,
                    void* out) const override {
    return tensors_->Read(layer, expert, part, rows, cols, dtype, out);
  }

 private:
  const ExpertTensors* tensors_;
};

}  // namespace tandem::expert
