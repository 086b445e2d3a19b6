// compressed-tensors' int-quantized and pack-quantized (notes/models.md 5.2, 5.3), row-major.

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/scheme_parts.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

constexpr std::string_view kScale[] = {".weight_scale"};
constexpr std::string_view kZeroPoint[] = {".weight_zero_point"};
constexpr std::string_view kShape[] = {".weight_shape"};
constexpr std::string_view kGroupIndex[] = {".weight_g_idx"};

int64_t PackedWidth(int64_t cols, int bits) { return DivideUp(cols * bits, 32); }

// The listed scheme that the shapes fit. More than one may fit only if they say the same, as groups
// of any size do that hold the whole row.
absl::StatusOr<QuantizedWeights> ChooseWeights(const MatrixRequest& request, const Tensor& codes,
                                               const Tensor& scale) {
  // A scale for the tensor, or one a row, may come without a dimension for groups.
  const auto width = [](const Tensor& tensor) {
    return tensor.view.rank < 2 ? 1 : tensor.view.shape[tensor.view.rank - 1];
  };
  const QuantizedWeights* chosen = nullptr;
  for (const QuantizedWeights& one : request.scheme.weights) {
    const int64_t groups = one.group_columns == 0 ? 1 : DivideUp(request.cols, one.group_columns);
    const bool packed = codes.view.dtype == DType::kI32;
    const int64_t codes_width = packed ? PackedWidth(request.cols, one.bits) : request.cols;
    if (width(scale) != groups || width(codes) != codes_width) continue;
    const bool one_group = groups == 1;
    if (chosen != nullptr &&
        (chosen->bits != one.bits || (!one_group && chosen->group_columns != one.group_columns))) {
      return TensorError(codes, "fits two config groups of quantization_config");
    }
    chosen = &one;
  }
  if (chosen != nullptr) return *chosen;
  return TensorError(codes, absl::StrCat("shape ", ShapeText(codes.view), " with scales ",
                                         ShapeText(scale.view), " for ", request.cols,
                                         " inputs fits no config group of quantization_config"));
}

absl::Status AddZeros(const Tensor& zeros, RowMajorLayout& layout) {
  const bool packed = layout.shape.tensor->view.dtype == DType::kI32;
  layout.zeros = &zeros;
  layout.zero_layout = packed ? ZeroLayout::kPackedRows : ZeroLayout::kInt8;
  layout.shape.zero = ZeroPoint::kExplicit;
  layout.shape.stored_bytes += layout.place.ShareOf(zeros);
  if (zeros.view.dtype != (packed ? DType::kI32 : DType::kI8)) {
    return BadDType(zeros, "zero points");
  }
  const int64_t rows =
      packed ? DivideUp(layout.shape.rows * layout.code_bits, 32) : layout.shape.rows;
  if (zeros.view.rank == 2 && zeros.view.shape[0] == rows &&
      zeros.view.shape[1] == layout.scale_width) {
    return absl::OkStatus();
  }
  return TensorError(zeros, absl::StrCat("shape is ", ShapeText(zeros.view), ", expected [", rows,
                                         ",", layout.scale_width, "]"));
}

// weight_shape repeats rows and columns; a file that disagrees with the config is refused.
absl::Status CheckStoredShape(const MatrixRequest& request, RowMajorLayout& layout) {
  const Tensor* shape = FindBeside(request, kShape);
  if (shape == nullptr) return absl::OkStatus();
  layout.shape.stored_bytes +=
      static_cast<uint64_t>(shape->view.Elements()) * DTypeBytes(shape->view.dtype);
  if (shape->view.Elements() != 2) return TensorError(*shape, "does not hold two sizes");
  int64_t sizes[2] = {};
  for (int i = 0; i < 2; ++i) {
    ASSIGN_OR_RETURN(sizes[i], IntegerAt(*shape, i));
  }
  if (sizes[0] == request.rows && sizes[1] == request.cols) return absl::OkStatus();
  return TensorError(*shape, absl::StrCat("holds [", sizes[0], ",", sizes[1], "], expected [",
                                          request.rows, ",", request.cols, "]"));
}

// Codes are unsigned in pack-quantized tensors and two's complement in int-quantized ones; kInt8 is
// two's complement, all others are unsigned.
SourceOr Finish(const MatrixRequest& request, RowMajorLayout layout) {
  const bool packed = layout.shape.tensor->view.dtype == DType::kI32;
  const bool has_zero = layout.shape.zero == ZeroPoint::kExplicit;
  const Tensor* index = FindBeside(request, kGroupIndex);
  std::vector<int32_t> groups;
  if (index != nullptr) {
    layout.shape.stored_bytes += static_cast<uint64_t>(request.cols) * sizeof(int32_t);
    ASSIGN_OR_RETURN(groups, ReadGroupIndex(*index, request.cols, layout.scale_width,
                                            layout.shape.group_columns));
  }
  const ZeroPoint zero = groups.empty() ? layout.shape.zero : ZeroPoint::kExplicit;
  ASSIGN_OR_RETURN(layout.shape.format, IntegerFormat(*layout.scale, layout.code_bits, zero));
  const bool is_signed = layout.code_bits == 8 && zero != ZeroPoint::kExplicit;
  if (packed == is_signed) layout.code_xor = 0x80;
  if (groups.empty()) return std::shared_ptr<const MatrixSource>(MakeRowMajor(layout));
  layout.implied_zero = has_zero ? 0 : 1u << (layout.code_bits - 1);
  return MakeDecodedIntegers(MakeRowMajor(layout), std::move(groups));
}

SourceOr OpenIntegers(const MatrixRequest& request, const Tensor& codes, const Tensor& scale,
                      const QuantizedWeights& weights) {
  const int stored_bits = codes.view.dtype == DType::kI8 ? 8 : weights.bits;
  if (stored_bits != 4 && stored_bits != 8) {
    return TensorError(codes, absl::StrCat("weights of ", weights.bits,
                                           " bits are not supported, expected 4 or 8"));
  }
  ASSIGN_OR_RETURN(RowMajorLayout layout, StartRowMajor(request, codes, stored_bits));
  RETURN_IF_ERROR(CheckStoredShape(request, layout));
  const bool one_scale = scale.view.Elements() == 1 && scale.view.rank < 2;
  RETURN_IF_ERROR(AddScales(scale, one_scale ? 0 : 1, weights.group_columns, layout));
  if (const Tensor* zeros = FindBeside(request, kZeroPoint)) {
    if (request.fused.step != 0) {
      return TensorError(*zeros, "zero points of fused experts are not supported");
    }
    RETURN_IF_ERROR(AddZeros(*zeros, layout));
  } else if (!weights.symmetric) {
    return TensorError(codes,
                       "its zero points are missing: quantization_config says that the "
                       "weights are not symmetric");
  }
  return Finish(request, std::move(layout));
}

}  // namespace

absl::StatusOr<WeightFormat> IntegerFormat(const Tensor& scale, int bits, ZeroPoint zero) {
  const bool has_zero = zero == ZeroPoint::kExplicit;
  const WeightFormat f32 = bits == 8
                               ? (has_zero ? WeightFormat::kInt8ZeroF32 : WeightFormat::kInt8F32)
                               : (has_zero ? WeightFormat::kInt4ZeroF32 : WeightFormat::kInt4F32);
  const auto after = [f32](int types) {
    return static_cast<WeightFormat>(static_cast<int>(f32) + types);
  };
  switch (scale.view.dtype) {
    case DType::kF32:
      return f32;
    case DType::kBF16:
      return after(1);
    case DType::kF16:
      return after(2);
    default:
      return BadDType(scale, "scales of integers");
  }
}

absl::StatusOr<int64_t> IntegerAt(const Tensor& tensor, int64_t index) {
  const auto* bytes = tensor.view.As<const uint8_t>();
  if (tensor.view.dtype == DType::kI64) {
    int64_t value = 0;
    std::memcpy(&value, bytes + index * static_cast<int64_t>(sizeof(value)), sizeof(value));
    return value;
  }
  if (tensor.view.dtype != DType::kI32) return BadDType(tensor, "an integer");
  int32_t value = 0;
  std::memcpy(&value, bytes + index * static_cast<int64_t>(sizeof(value)), sizeof(value));
  return value;
}

absl::StatusOr<std::vector<int32_t>> ReadGroupIndex(const Tensor& index, int64_t cols,
                                                    int64_t groups, int64_t group_columns) {
  if (index.view.rank != 1 || index.view.shape[0] != cols) {
    return TensorError(index,
                       absl::StrCat("shape is ", ShapeText(index.view), ", expected [", cols, "]"));
  }
  std::vector<int32_t> columns(static_cast<size_t>(cols));
  bool sequential = true;
  for (int64_t col = 0; col < cols; ++col) {
    ASSIGN_OR_RETURN(const int64_t group, IntegerAt(index, col));
    if (group < 0 || group >= groups) {
      return TensorError(index,
                         absl::StrCat("element [", col, "] is group ", group, " of ", groups));
    }
    sequential = sequential && group == (group_columns == 0 ? 0 : col / group_columns);
    columns[static_cast<size_t>(col)] = static_cast<int32_t>(group);
  }
  if (sequential) columns.clear();
  return columns;
}

SourceOr OpenInt8(const MatrixRequest& request, const Tensor& weight) {
  ASSIGN_OR_RETURN(const Tensor* scale, GetBeside(request, weight, kScale));
  ASSIGN_OR_RETURN(const QuantizedWeights weights, ChooseWeights(request, weight, *scale));
  return OpenIntegers(request, weight, *scale, weights);
}

SourceOr OpenPackedInts(const MatrixRequest& request, const Tensor& packed) {
  ASSIGN_OR_RETURN(const Tensor* scale, GetBeside(request, packed, kScale));
  ASSIGN_OR_RETURN(const QuantizedWeights weights, ChooseWeights(request, packed, *scale));
  return OpenIntegers(request, packed, *scale, weights);
}

}  // namespace tandem
