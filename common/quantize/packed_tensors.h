#pragma once

// Codes and group parameters as the tensors of a compressed-tensors checkpoint (notes: its formats
// pack-quantized, int-quantized, float-quantized and mxfp4-pack-quantized):
//
//   format         tensors of a module with weight [N, K] and G groups a row
//   kInt4Bf16      weight_packed I32 [N, ceil(K/8)], weight_scale BF16 [N, G], weight_shape I64 [2]
//   kInt4ZeroBf16  the same and weight_zero_point I32 [ceil(N/8), G]
//   kInt8Bf16      weight I8 [N, K], weight_scale BF16 [N, G]
//   kFp8           weight F8_E4M3 [N, K], weight_scale BF16 [ceil(N/group_rows), G]
//   kMxfp4         weight_packed U8 [N, K/2], weight_scale U8 [N, G]
//
// Four-bit codes lie least significant first: element k of a row in bits 4 * (k mod 8) of word
// k / 8; zero points likewise along rows. Thread-safe.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "common/quantize/encode.h"
#include "common/tensor/dtype.h"

namespace tandem {

struct PackedTensor {
  std::string suffix;  // "weight_packed", after the module's name and a dot
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  // One leading index of the tensor stands for so many rows of the matrix; 0: all of them.
  int64_t rows_per_index = 1;

  // Bytes of one leading index.
  uint64_t StrideBytes() const;
  // Where the bytes of rows from `first_row` (a multiple of kPackRows) on belong; nothing for later
  // rows of a tensor that the first ones fill.
  std::optional<uint64_t> OffsetOf(int64_t first_row) const;
};

// A format whose code width or group does not divide the columns cannot be stored by every reader
// of these checkpoints. Errors: INVALID_ARGUMENT saying which number is wrong.
absl::Status CheckPackable(const EncodeTarget& target, int64_t rows, int64_t cols);

// REQUIRES: CheckPackable was OK, also below.
std::vector<PackedTensor> PackedTensors(const EncodeTarget& target, int64_t rows, int64_t cols);

// The bytes that `rows` rows, the first at a multiple of kPackRows of the matrix, contribute to
// each of PackedTensors, in its order. `matrix_rows` are those of the whole matrix. `codes` and
// `groups` as Encode gives them.
std::vector<std::string> PackRows(const EncodeTarget& target, int64_t matrix_rows, int64_t cols,
                                  int64_t rows, const uint8_t* codes,
                                  const GroupParameters* groups);

// Rows that can be packed on their own: blocks of 128 and words of 8 zero points end with them.
inline constexpr int64_t kPackRows = 128;

}  // namespace tandem
