#pragma once

// Quantized weights stored row by row: codes of 4 or 8 bits, the first in the low bits of a byte,
// and beside them a row-major grid of scales (and perhaps of zero points). Every safetensors scheme
// but AWQ and GPTQ is this layout with other types and group sizes.
//
// Thread safety, ownership, errors: as MatrixSource.

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/coded_source.h"
#include "common/checkpoint/schemes.h"

namespace tandem {

inline int64_t DivideUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Which rows of a (perhaps fused) tensor are the matrix's.
class RowPlace {
 public:
  // `codes` is the tensor that has one row a weight row.
  static absl::StatusOr<RowPlace> Find(const MatrixRequest& request,
                                       const Checkpoint::Tensor& codes);

  // The row of row `row` in a tensor with one row for every `block_rows` rows of weights.
  int64_t At(int64_t row, int64_t block_rows) const {
    return matrix_ * DivideUp(tensor_rows_, block_rows) + (first_ + row * step_) / block_rows;
  }
  // Refuses a tensor that is not such a one with `width` elements a row.
  absl::Status Check(const Checkpoint::Tensor& tensor, int64_t block_rows, int64_t width,
                     std::string_view what) const;
  // Whether it is such a one of one element a row, without a dimension for it.
  bool IsColumn(const Checkpoint::Tensor& tensor, int64_t block_rows) const;
  // Rows of one matrix of the tensor: more than the matrix has where gate and up share it.
  int64_t tensor_rows() const { return tensor_rows_; }
  // Bytes of `tensor` that belong to the matrix.
  uint64_t ShareOf(const Checkpoint::Tensor& tensor) const;

 private:
  bool fused_ = false;
  int64_t matrices_ = 1;
  int64_t tensor_rows_ = 0;  // of one matrix of the tensor
  int64_t matrix_ = 0;
  int64_t first_ = 0;
  int64_t step_ = 1;
  int64_t rows_ = 0;
};

enum class ZeroLayout : uint8_t {
  kNone,
  kPackedRows,  // I32 [ceil(rows * bits / 32), groups], rows packed as the codes are
  kInt8,        // I8 [rows, groups], signed: the offset of the codes is added
};

struct RowMajorLayout {
  CodedShape shape;
  RowPlace place;
  int code_bits = 8;
  uint8_t code_xor = 0;   // 0x80 turns an offset of 128 into two's complement and back
  int64_t row_bytes = 0;  // of codes
  const Checkpoint::Tensor* scale = nullptr;
  int64_t scale_rows = 1;   // rows that share a scale; 0: all
  int64_t scale_width = 1;  // scales a row of the grid
  const Checkpoint::Tensor* zeros = nullptr;
  ZeroLayout zero_layout = ZeroLayout::kNone;
  uint32_t implied_zero = 0;  // where there are no zero points stored
  uint32_t super = 0;
};

std::unique_ptr<const CodedSource> MakeRowMajor(const RowMajorLayout& layout);

}  // namespace tandem
