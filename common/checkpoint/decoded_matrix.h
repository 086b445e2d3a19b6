#pragma once

// A linear layer's weight [rows, cols] (out x in) as the file holds it, read as F32 or BF16 in any
// rectangle. What the file holds decides, not the config's list of unconverted modules: a BF16, F16
// or F32 tensor is plain; an F8_E4M3 tensor has a grid of scales beside it, one per block of
// `block_rows` x `block_cols` (the last block of a row or column is just smaller), and
//   w[r, c] = fp8[r, c] * scale[r / block_rows, c / block_cols]
// as one F32 product (DeepSeek-V3, README_WEIGHTS; the scale's name, weight_scale_inv,
// notwithstanding). Block sizes come from the config, never from dividing shapes.
//
// Thread safety: immutable; any thread may read. Ownership: views into a Checkpoint, which must
// outlive it. Errors: unknown dtype, missing or misshapen scales at Create; NaN and infinities, in
// weights, FP8 codes or scales, at Read, naming file, tensor and element.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/tensor/dtype.h"

namespace tandem {

struct ScaleBlock {
  int64_t rows = 128;
  int64_t cols = 128;
};

class DecodedMatrix {
 public:
  // `weight_name` is the full tensor name ("....q_proj.weight"); its scales are looked up as
  // `weight_name` + "_scale_inv", or ".scale" in place of ".weight" (DeepSeek-V4).
  static absl::StatusOr<DecodedMatrix> Create(const Checkpoint& checkpoint,
                                              std::string_view weight_name, int64_t rows,
                                              int64_t cols, ScaleBlock block);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  bool is_scaled() const { return scale_ != nullptr; }
  // The smaller of BF16 and F32 that holds every value exactly.
  DType native_dtype() const;
  // Bytes in the file, scales included.
  uint64_t stored_bytes() const;
  const Checkpoint::Tensor& tensor() const { return *weight_; }

  // Row-major into `out`, [rows.size(), cols.size()].
  absl::Status ReadF32(Range rows, Range cols, std::span<float> out) const;
  // As ReadF32, rounded to nearest even where a value does not fit.
  absl::Status ReadBf16(Range rows, Range cols, std::span<uint16_t> out) const;

 private:
  DecodedMatrix() = default;
  absl::Status CheckRange(Range rows, Range cols, size_t out_elements) const;
  absl::Status ReadRow(int64_t row, Range cols, float* out) const;
  absl::Status ReadScaledRow(int64_t row, Range cols, float* out) const;

  const Checkpoint::Tensor* weight_ = nullptr;
  const Checkpoint::Tensor* scale_ = nullptr;  // null: plain
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  ScaleBlock block_;
};

}  // namespace tandem
