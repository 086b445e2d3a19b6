#pragma once

// The other direction of common/checkpoint/decode.h: F32 weights to codes and group parameters of
// the formats that `tandem quantize` writes, with the scale of each group chosen for the least
// squared error.
//
// A group is `group_rows` x `group_columns` weights that share a scale s. With Q the values that a
// code can stand for (the integers of the range, the E4M3 or the E2M1 values) and w' = Q's nearest
// value to w / s, ties to even, the scale is the candidate with the least
//   E(s) = sum over the group of (w - s * w')^2
// where a is the group's largest magnitude and the candidates are
//   kInt4Bf16, kInt8Bf16   s = t * a / 7 (127), t = 1, 31/32 ... 1/2; then twice the least-squares
//                          scale of the best one's codes, sum(w * w') / sum(w'^2)
//   kInt4ZeroBf16          the same t on both ends of the range: s = t * (max - min) / 15, where
//   the
//                          range is widened to hold 0, and three zero points around -t * min / s
//   kFp8                   s = t * a / 448, t = 2^(j/16) for j = 0 .. 15 (beyond, the E4M3 grid
//                          repeats itself) and 31/32, 30/32
//   kMxfp4                 s = 2^(e + d), e = floor(log2 a) - 2 (OCP MX 1.0, section 6.3), d = 0,
//   -1, 1
// The first candidate is what a plain quantizer takes, so the search is never worse than it. Scales
// are rounded to the type that is stored (BF16, E8M0) before they are judged.
//
// Thread-safe; allocates one group. Errors: INVALID_ARGUMENT for a weight that is not finite or
// above kMaxWeight, naming row and column.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/tensor/weight_format.h"

namespace tandem {

struct EncodeTarget {
  // kInt8Bf16, kInt4Bf16, kInt4ZeroBf16, kFp8 or kMxfp4.
  WeightFormat format = WeightFormat::kInt4Bf16;
  uint32_t group_columns = 32;  // 0: the whole row
  uint32_t group_rows = 1;      // 128 in FP8 blocks
};

enum class ScaleSearch : uint8_t {
  kNone,          // the first candidate
  kLeastSquares,  // the best of all
};

// Squares of larger weights, and their sums, would leave F32.
inline constexpr float kMaxWeight = 0x1p50f;

struct EncodeLoss {
  double squared_error = 0;
  double squared_weights = 0;

  EncodeLoss& operator+=(const EncodeLoss& other) {
    squared_error += other.squared_error;
    squared_weights += other.squared_weights;
    return *this;
  }
  // Root of the squared error's share: 0 for weights that are all zero.
  double Relative() const;
};

constexpr uint32_t GroupsInRow(int64_t cols, const EncodeTarget& target) {
  return GroupsTouched(0, static_cast<uint32_t>(cols), target.group_columns);
}

// Encodes `values` [rows, cols] into `codes` [rows, cols] and `groups` [rows, GroupsInRow]. The
// last group of a row, and the last block of rows, may be smaller. Scales of kFp8 are BF16 values
// in F32.
absl::StatusOr<EncodeLoss> Encode(const float* values, int64_t rows, int64_t cols,
                                  const EncodeTarget& target, ScaleSearch search, uint8_t* codes,
                                  GroupParameters* groups);

}  // namespace tandem
