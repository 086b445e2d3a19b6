#pragma once

// The one definition of what a code is worth: the table of common/tensor/weight_format.h as scalar
// code, every operation one F32 operation rounded to nearest (this file's source is compiled
// without contraction into fused multiply-adds). Not tuned: packers and kernels are tested against
// it.
//
// Thread-safe; no allocation. Signed parameters are two's complement in their low byte.

#include <cstdint>
#include <optional>

#include "common/tensor/weight_format.h"

namespace tandem {

// (code - zero) * scale, the value of every integer format.
float DecodeInteger(int code, int zero, float scale);

// The scale of an integer format (kInt8*, kInt8Zero*, kInt4*, kInt4Zero*) as F32.
float IntegerScale(WeightFormat format, const GroupParameters& group);

// The value of one code. REQUIRES: a quantized format, a code in its range.
float DecodeWeight(WeightFormat format, uint8_t code, const GroupParameters& group);

// `count` codes of one row, the first at absolute column `first_column`; `groups` begins with the
// group of that column.
void DecodeWeights(WeightFormat format, const uint8_t* codes, int64_t count,
                   const GroupParameters* groups, uint32_t group_columns, int64_t first_column,
                   float* out);

// Whether every code in the format's range (but FP8's NaNs) has a finite value in this group: no
// scale is NaN or infinite, nor so large that the largest code overflows.
bool IsUsableGroup(WeightFormat format, const GroupParameters& group);

// Codes of the format: 0..CodeCount - 1.
int CodeCount(WeightFormat format);

// Index of the first NaN code of an FP8 format; none in other formats.
std::optional<int64_t> FindNanCode(WeightFormat format, const uint8_t* codes, int64_t count);

}  // namespace tandem
