// FP8 with one scale a block, row or tensor; MXFP8, MXFP4 and NVFP4 (notes/models.md 5.1, 5.2, 5.6,
// 5.7). What differs between their publishers is the names and types of the scales.

#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/scheme_parts.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

constexpr int64_t kMxColumns = 32;  // OCP microscaling formats 1.0, section 5.2
constexpr int64_t kNvfp4Columns = 16;

constexpr std::string_view kFp8Scales[] = {".weight_scale_inv", ".scale", ".weight_scale"};
constexpr std::string_view kMxfp4Scales[] = {".scale", ".weight_scale", "_scales", ".scales"};

bool IsOneOf(DType dtype, std::initializer_list<DType> list) {
  for (DType one : list) {
    if (dtype == one) return true;
  }
  return false;
}

// Rows and columns of a block by the shape of `scale`: one value, one a row, or the config's block.
absl::Status AddFp8Scales(const MatrixRequest& request, const Tensor& scale,
                          RowMajorLayout& layout) {
  const TensorView& view = scale.view;
  if (view.Elements() == 1 && view.rank < 2) return AddScales(scale, 0, 0, layout);
  if (layout.place.IsColumn(scale, 1)) return AddScales(scale, 1, 0, layout);
  const int64_t rows = layout.place.tensor_rows();
  const bool is_channel =
      view.rank >= 2 && view.shape[view.rank - 1] == 1 && view.shape[view.rank - 2] == rows;
  const ScaleBlock& block = request.scheme.block;
  // A single column of blocks as high as a row is no channel's scale when blocks are one row high.
  if (is_channel && DivideUp(rows, block.rows) != rows) {
    return AddScales(scale, 1, 0, layout);
  }
  if (block.rows <= 0 || block.cols <= 0) {
    return absl::InvalidArgumentError("the block of FP8 scales must have positive sides");
  }
  return AddScales(scale, block.rows, block.cols, layout);
}

absl::StatusOr<std::shared_ptr<const MatrixSource>> Finish(RowMajorLayout layout,
                                                           WeightFormat format) {
  layout.shape.format = format;
  return std::shared_ptr<const MatrixSource>(MakeRowMajor(layout));
}

// The factor of all NVFP4 groups of a tensor: ModelOpt multiplies by it, compressed-tensors
// divides.
absl::Status ReadGlobalScale(const MatrixRequest& request, const Tensor& codes,
                             RowMajorLayout& layout) {
  constexpr std::string_view kFactor[] = {".weight_scale_2"};
  constexpr std::string_view kDivisor[] = {".weight_global_scale"};
  const Tensor* tensor = FindBeside(request, kDivisor);
  const bool divides = tensor != nullptr;
  if (!divides) {
    ASSIGN_OR_RETURN(tensor, GetBeside(request, codes, kFactor));
  }
  if (tensor->view.dtype != DType::kF32) return BadDType(*tensor, "a global scale");
  if (tensor->view.Elements() != 1) {
    return TensorError(*tensor, absl::StrCat("shape is ", ShapeText(tensor->view),
                                             ", expected one scale for the tensor"));
  }
  float value = 0;
  ConvertToF32(DType::kF32, tensor->view.data, 1, &value);
  const float factor = divides ? 1 / value : value;
  if (!std::isfinite(value) || !std::isfinite(factor)) {
    return TensorError(*tensor, "the global scale is not a finite number of usable size");
  }
  layout.super = std::bit_cast<uint32_t>(factor);
  layout.shape.stored_bytes += sizeof(float);
  return absl::OkStatus();
}

}  // namespace

SourceOr OpenFp8(const MatrixRequest& request, const Tensor& weight) {
  ASSIGN_OR_RETURN(RowMajorLayout layout, StartRowMajor(request, weight, 8));
  ASSIGN_OR_RETURN(const Tensor* scale, GetBeside(request, weight, kFp8Scales));
  const DType dtype = scale->view.dtype;
  // An E8M0 scale is a block's in DeepSeek-V4 (F8_E8M0) and a group's in MXFP8 (U8).
  const bool is_mx = dtype == DType::kU8 ||
                     (dtype == DType::kF8E8M0 && request.scheme.method == QuantMethod::kMxfp8);
  if (is_mx) {
    RETURN_IF_ERROR(AddScales(*scale, 1, kMxColumns, layout));
    return Finish(layout, WeightFormat::kMxfp8);
  }
  if (!IsOneOf(dtype, {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E8M0})) {
    return BadDType(*scale, "scales of FP8");
  }
  RETURN_IF_ERROR(AddFp8Scales(request, *scale, layout));
  return Finish(layout, WeightFormat::kFp8);
}

SourceOr OpenNibbleFloats(const MatrixRequest& request, const Tensor& codes) {
  ASSIGN_OR_RETURN(RowMajorLayout layout, StartRowMajor(request, codes, 4));
  ASSIGN_OR_RETURN(const Tensor* scale, GetBeside(request, codes, kMxfp4Scales));
  if (IsOneOf(scale->view.dtype, {DType::kU8, DType::kF8E8M0})) {
    RETURN_IF_ERROR(AddScales(*scale, 1, kMxColumns, layout));
    return Finish(layout, WeightFormat::kMxfp4);
  }
  if (scale->view.dtype != DType::kF8E4M3) return BadDType(*scale, "scales of 4-bit floats");
  RETURN_IF_ERROR(AddScales(*scale, 1, kNvfp4Columns, layout));
  RETURN_IF_ERROR(ReadGlobalScale(request, codes, layout));
  return Finish(layout, WeightFormat::kNvfp4);
}

}  // namespace tandem
