#pragma once

// The schemes of schemes.h by likeness, each from the tensor that holds elements or codes, and what
// they share. Internal to common/checkpoint.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/checkpoint/row_major.h"
#include "common/checkpoint/schemes.h"

namespace tandem {

using SourceOr = absl::StatusOr<std::shared_ptr<const MatrixSource>>;
using Tensor = Checkpoint::Tensor;

SourceOr OpenPlain(const MatrixRequest& request, const Tensor& weight);
SourceOr OpenFp8(const MatrixRequest& request, const Tensor& weight);   // and MXFP8
SourceOr OpenInt8(const MatrixRequest& request, const Tensor& weight);  // int-quantized
SourceOr OpenPackedInts(const MatrixRequest& request, const Tensor& packed);
SourceOr OpenNibbleFloats(const MatrixRequest& request, const Tensor& codes);  // MXFP4, NVFP4
SourceOr OpenInputMajor(const MatrixRequest& request, const Tensor& qweight);  // AWQ, GPTQ

// "x.q_proj" of "x.q_proj.weight"; a name without that ending is its own module's.
std::string ModuleName(std::string_view weight_name);

// The first of module + suffix that exists; null when none does.
const Tensor* FindBeside(const MatrixRequest& request, std::span<const std::string_view> suffixes);
// The same, an error naming the first suffix when none exists.
absl::StatusOr<const Tensor*> GetBeside(const MatrixRequest& request, const Tensor& weight,
                                        std::span<const std::string_view> suffixes);

absl::Status BadDType(const Tensor& tensor, std::string_view what);

// kInt8*, kInt8Zero*, kInt4* or kInt4Zero* with scales of that type.
absl::StatusOr<WeightFormat> IntegerFormat(const Tensor& scale, int bits, ZeroPoint zero);

// Element `index` of an I32 or I64 tensor.
absl::StatusOr<int64_t> IntegerAt(const Tensor& tensor, int64_t index);

// The group of every column from an I32 tensor [cols], each below `groups`; empty where the groups
// are those of consecutive `group_columns`.
absl::StatusOr<std::vector<int32_t>> ReadGroupIndex(const Tensor& index, int64_t cols,
                                                    int64_t groups, int64_t group_columns);

// A layout with place, codes and bytes filled for `codes` of `bits` bits, its shape checked.
absl::StatusOr<RowMajorLayout> StartRowMajor(const MatrixRequest& request, const Tensor& codes,
                                             int bits);
// Adds a grid of scales, one for every `scale_rows` rows (0: one for all) and group.
absl::Status AddScales(const Tensor& scale, int64_t scale_rows, int64_t group_columns,
                       RowMajorLayout& layout);

}  // namespace tandem
