#pragma once

// Where the weights of routed experts come from while a store is filled: a checkpoint, or memory in
// tests. Shapes: gate and up [intermediate, hidden], down [hidden, intermediate].
// Implementations are immutable; any thread may read. Errors name file and tensor.

#include <string>

#include "absl/status/status.h"
#include "common/model/expert_tensors.h"
#include "expert_worker/engine/segments.h"

namespace tandem::expert {

// One of the three matrices of an expert.
struct ExpertMatrix {
  int layer;
  int expert;
  ExpertPart part;
};

class ExpertSource {
 public:
  virtual ~ExpertSource() = default;

  virtual MatrixFormat format(const ExpertMatrix& matrix) const = 0;

  // Rows x cols, row-major without gaps, as elements of `plain`: the matrix's own format, or kF32
  // (exact values of any format), or kBf16 (those rounded).
  virtual absl::Status ReadElements(const ExpertMatrix& matrix, Range rows, Range cols,
                                    WeightFormat plain, void* out) const = 0;
  // Of quantized formats: `codes` [rows, cols] and `groups` [rows, GroupsTouched(cols)].
  virtual absl::Status ReadCodes(const ExpertMatrix& matrix, Range rows, Range cols, uint8_t* codes,
                                 GroupParameters* groups) const = 0;
  // Only asked of models with biases.
  virtual absl::Status ReadBias(const ExpertMatrix& matrix, Range /*rows*/, float* /*out*/) const {
    return absl::FailedPreconditionError("expert " + std::to_string(matrix.expert) + " of layer " +
                                         std::to_string(matrix.layer) + " has no biases");
  }
};

// The experts of a checkpoint. `tensors` must outlive it.
class CheckpointExperts final : public ExpertSource {
 public:
  explicit CheckpointExperts(const ExpertTensors* tensors) : tensors_(tensors) {}

  MatrixFormat format(const ExpertMatrix& matrix) const override;
  absl::Status ReadElements(const ExpertMatrix& matrix, Range rows, Range cols, WeightFormat plain,
                            void* out) const override;
  absl::Status ReadCodes(const ExpertMatrix& matrix, Range rows, Range cols, uint8_t* codes,
                         GroupParameters* groups) const override;

 private:
  const WeightMatrix& Find(const ExpertMatrix& m) const {
    return tensors_->matrix(m.layer, m.expert, m.part);
  }

  const ExpertTensors* tensors_;
};

}  // namespace tandem::expert
