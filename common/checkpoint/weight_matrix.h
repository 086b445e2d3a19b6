#pragma once

// A linear layer's weight [rows, cols] (out x in) as the file holds it, whatever its quantization:
// exact F32 values of any rectangle, or the codes and group parameters themselves.
//
//   ASSIGN_OR_RETURN(auto matrix, WeightMatrix::Create(checkpoint, "....up_proj.weight", n, k,
//   scheme)); RETURN_IF_ERROR(matrix.ReadF32({0, 16}, {0, k}, out));
//
// A cheap handle, copied freely. Thread safety: immutable; any thread may read. Ownership: views
// into a checkpoint, which must outlive it. Errors: missing or misshapen tensors at Create; NaN,
// infinities and scales with which a code overflows F32 at Read, naming file, tensor and element.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/matrix_source.h"
#include "common/checkpoint/quant_scheme.h"
#include "common/tensor/dtype.h"
#include "common/tensor/weight_format.h"

namespace tandem {

class WeightMatrix {
 public:
  // `weight_name` is the name that the unquantized model gives the tensor ("....q_proj.weight");
  // schemes.h says which tensors stand for it.
  static absl::StatusOr<WeightMatrix> Create(const Checkpoint& checkpoint,
                                             std::string_view weight_name, int64_t rows,
                                             int64_t cols, const QuantScheme& scheme,
                                             FusedRows fused = {});
  // REQUIRES: not null.
  explicit WeightMatrix(std::shared_ptr<const MatrixSource> source);

  int64_t rows() const { return source_->rows(); }
  int64_t cols() const { return source_->cols(); }
  WeightFormat format() const { return source_->format(); }
  uint32_t group_columns() const { return source_->group_columns(); }
  // The smaller of BF16 and F32 that holds every value exactly.
  DType native_dtype() const;
  // Bytes in the file, scales included.
  uint64_t stored_bytes() const { return source_->stored_bytes(); }
  const Checkpoint::Tensor& tensor() const { return source_->tensor(); }

  // Row-major into `out`, [rows.size(), cols.size()].
  absl::Status ReadF32(Range rows, Range cols, std::span<float> out) const;
  // As ReadF32, rounded to nearest even where a value does not fit.
  absl::Status ReadBf16(Range rows, Range cols, std::span<uint16_t> out) const;
  // As MatrixSource, with ranges and numbers checked.
  absl::Status ReadElements(Range rows, Range cols, void* out) const;
  absl::Status ReadCodes(Range rows, Range cols, uint8_t* codes, GroupParameters* groups) const;

 private:
  absl::Status CheckRange(Range rows, Range cols) const;
  absl::Status CheckOut(Range rows, Range cols, size_t out_elements) const;
  absl::Status CheckGroups(Range rows, Range cols, const GroupParameters* groups) const;
  absl::Status ReadBlock(Range rows, Range cols, float* out) const;
  absl::Status NonFinite(int64_t row, int64_t col) const;

  std::shared_ptr<const MatrixSource> source_;
};

}  // namespace tandem
