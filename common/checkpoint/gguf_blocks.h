#pragma once

// GGUF block types as the arithmetic of common/tensor/weight_format.h: each type is a WeightFormat,
// and a block of it unpacks to one code a column and the GroupParameters of its groups. Layouts:
// notes/models.md section 5.8.
//
// Thread safety: immutable; any thread may read.

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/gguf.h"
#include "common/checkpoint/matrix_source.h"
#include "common/tensor/weight_format.h"

namespace tandem {

struct GgufBlockFormat {
  WeightFormat format = WeightFormat::kF32;
  uint32_t group_columns = 0;  // divides the block's elements
  // Codes [block elements] and groups [block elements / group_columns] of one block; null for plain
  // types.
  void (*unpack)(const uint8_t* block, uint8_t* codes, GroupParameters* groups) = nullptr;
};

const GgufBlockFormat& FormatOf(GgufType type);

// A matrix of a checkpoint that was opened from GGUF. REQUIRES: tensor.gguf is set; the tensor
// lives as long as the source. An error when it is not [rows, cols].
absl::StatusOr<std::shared_ptr<const MatrixSource>> OpenGgufMatrix(const Checkpoint::Tensor& tensor,
                                                                   int64_t rows, int64_t cols);

}  // namespace tandem
