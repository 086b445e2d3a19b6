#pragma once

// One linear weight [rows, cols] (out x in) inside a checkpoint file, in the arithmetic of its
// WeightFormat: what every quantization scheme and GGUF block type implements, and nothing else.
// WeightMatrix (weight_matrix.h) puts exact F32 values and the checks of numbers on top.
//
// A plain format (IsPlain) implements ReadElements, all others ReadCodes. A layout that no format
// describes is presented as kF32: ReadElements gives its exact values. Today these are act-order
// (columns whose groups are not consecutive) and GPTQ's 8-bit codes whose zero points reach 256.
//
// Thread safety: immutable; any thread may read. Ownership: views into a checkpoint, which must
// outlive it. Errors: opening a source checks every shape, so that no read leaves a tensor; reads
// fail only on contents that the format forbids.
// REQUIRES of reads: 0 <= begin <= end <= rows() or cols().

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint/checkpoint.h"
#include "common/tensor/weight_format.h"

namespace tandem {

// Where a matrix lies in a tensor that holds several, [experts, tensor rows, ...]: with both
// leading dimensions taken as one, row r of the matrix is row `base` + r * `step`. Step 2 picks the
// gate or the up rows where they alternate (gpt-oss). Step 0: the tensor is the matrix.
struct FusedRows {
  int64_t base = 0;
  int64_t step = 0;
};

class MatrixSource {
 public:
  virtual ~MatrixSource() = default;

  virtual int64_t rows() const = 0;
  virtual int64_t cols() const = 0;
  virtual WeightFormat format() const = 0;
  // Columns that share their GroupParameters; 0: the whole row, and always for plain formats.
  virtual uint32_t group_columns() const = 0;
  // Bytes in the file, scales and all else of this matrix included.
  virtual uint64_t stored_bytes() const = 0;
  // The tensor that holds the elements or codes, for messages.
  virtual const Checkpoint::Tensor& tensor() const = 0;

  // Plain formats: the elements in the format's own type, row-major without gaps; `out` is aligned
  // for it.
  virtual absl::Status ReadElements(Range /*rows*/, Range /*cols*/, void* /*out*/) const {
    return TensorError(tensor(), "is quantized: it has codes, not elements");
  }
  // All others: `codes` [rows.size(), cols.size()] and
  // `groups` [rows.size(), GroupsTouched(cols.begin, cols.end, group_columns())].
  virtual absl::Status ReadCodes(Range /*rows*/, Range /*cols*/, uint8_t* /*codes*/,
                                 GroupParameters* /*groups*/) const {
    return TensorError(tensor(), "is not quantized: it has elements, not codes");
  }
  // An error about the parameters of row's group `group` (column / group_columns), naming the
  // tensor and element that hold them.
  virtual absl::Status GroupError(int64_t row, int64_t group, std::string_view what) const {
    return TensorError(tensor(), absl::StrCat("the scale of row ", row, ", group ", group, " ",
                                              std::string(what)));
  }
};

}  // namespace tandem
