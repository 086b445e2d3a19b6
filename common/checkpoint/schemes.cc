#include "common/checkpoint/schemes.h"

#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/gguf_blocks.h"
#include "common/checkpoint/quote.h"
#include "common/checkpoint/scheme_parts.h"

namespace tandem {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";

class PlainSource final : public MatrixSource {
 public:
  PlainSource(const MatrixRequest& request, const Tensor& tensor, const RowPlace& place,
              WeightFormat format)
      : rows_(request.rows), cols_(request.cols), format_(format), place_(place), tensor_(tensor) {}

  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  WeightFormat format() const override { return format_; }
  uint32_t group_columns() const override { return 0; }
  uint64_t stored_bytes() const override { return place_.ShareOf(tensor_); }
  const Tensor& tensor() const override { return tensor_; }

  absl::Status ReadElements(Range rows, Range cols, void* out) const override {
    const auto element = static_cast<int64_t>(DTypeBytes(tensor_.view.dtype));
    const auto bytes = static_cast<size_t>(cols.size() * element);
    if (bytes == 0) return absl::OkStatus();
    auto* to = static_cast<uint8_t*>(out);
    for (int64_t row = rows.begin; row < rows.end; ++row, to += bytes) {
      const int64_t first = place_.At(row, 1) * cols_ + cols.begin;
      std::memcpy(to, tensor_.view.As<const uint8_t>() + first * element, bytes);
    }
    return absl::OkStatus();
  }

 private:
  int64_t rows_;
  int64_t cols_;
  WeightFormat format_;
  RowPlace place_;
  const Tensor& tensor_;
};

SourceOr OpenByDType(const MatrixRequest& request, const Tensor& weight) {
  switch (weight.view.dtype) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
      return OpenPlain(request, weight);
    case DType::kF8E4M3:
      return OpenFp8(request, weight);
    case DType::kI8:
      // Two 4-bit codes a byte or one of 8 bits: the width tells.
      return weight.view.rank > 0 && weight.view.shape[weight.view.rank - 1] == request.cols
                 ? OpenInt8(request, weight)
                 : OpenNibbleFloats(request, weight);
    case DType::kU8:
      return OpenNibbleFloats(request, weight);
    default:
      return BadDType(weight, "a weight");
  }
}

SourceOr OpenPacked(const MatrixRequest& request, const Tensor& packed) {
  switch (packed.view.dtype) {
    case DType::kI32:
      return OpenPackedInts(request, packed);
    case DType::kU8:
      return OpenNibbleFloats(request, packed);
    default:
      return BadDType(packed, "packed weights");
  }
}

// The tensor `suffix` of a weight's module, and what reads it.
struct Container {
  std::string_view suffix;
  SourceOr (*open)(const MatrixRequest&, const Tensor&);
};
constexpr Container kContainers[] = {
    {".weight_packed", OpenPacked},
    {".qweight", OpenInputMajor},
    {"_blocks", OpenNibbleFloats},
    {".blocks", OpenNibbleFloats},
};

std::pair<const Tensor*, const Container*> FindContainer(const Checkpoint& checkpoint,
                                                         std::string_view weight_name) {
  for (const Container& container : kContainers) {
    const std::string name = absl::StrCat(ModuleName(weight_name), std::string(container.suffix));
    if (const Tensor* tensor = checkpoint.Find(name)) return {tensor, &container};
  }
  return {nullptr, nullptr};
}

}  // namespace

std::string ModuleName(std::string_view weight_name) {
  if (weight_name.ends_with(kWeightSuffix)) weight_name.remove_suffix(kWeightSuffix.size());
  return std::string(weight_name);
}

const Tensor* FindBeside(const MatrixRequest& request, std::span<const std::string_view> suffixes) {
  for (std::string_view suffix : suffixes) {
    const std::string name = absl::StrCat(ModuleName(request.weight_name), std::string(suffix));
    if (const Tensor* tensor = request.checkpoint.Find(name)) return tensor;
  }
  return nullptr;
}

absl::StatusOr<const Tensor*> GetBeside(const MatrixRequest& request, const Tensor& weight,
                                        std::span<const std::string_view> suffixes) {
  if (const Tensor* tensor = FindBeside(request, suffixes)) return tensor;
  const std::string name =
      absl::StrCat(ModuleName(request.weight_name), std::string(suffixes.front()));
  return TensorError(weight,
                     absl::StrCat("needs ", QuoteForMessage(name), " beside it, which is missing"));
}

absl::Status BadDType(const Tensor& tensor, std::string_view what) {
  return TensorError(tensor, absl::StrCat("dtype ", std::string(DTypeName(tensor.view.dtype)),
                                          " is not supported for ", std::string(what)));
}

SourceOr OpenPlain(const MatrixRequest& request, const Tensor& weight) {
  ASSIGN_OR_RETURN(const RowPlace place, RowPlace::Find(request, weight));
  RETURN_IF_ERROR(place.Check(weight, 1, request.cols, "its elements"));
  const WeightFormat format = weight.view.dtype == DType::kBF16  ? WeightFormat::kBf16
                              : weight.view.dtype == DType::kF16 ? WeightFormat::kF16
                                                                 : WeightFormat::kF32;
  return std::make_shared<PlainSource>(request, weight, place, format);
}

absl::StatusOr<RowMajorLayout> StartRowMajor(const MatrixRequest& request, const Tensor& codes,
                                             int bits) {
  RowMajorLayout layout;
  ASSIGN_OR_RETURN(layout.place, RowPlace::Find(request, codes));
  layout.code_bits = bits;
  const auto element = static_cast<int64_t>(DTypeBytes(codes.view.dtype));
  const int64_t width = DivideUp(request.cols * bits, element * 8);
  layout.row_bytes = width * element;
  RETURN_IF_ERROR(
      layout.place.Check(codes, 1, width, absl::StrCat(request.cols, " codes of ", bits, " bits")));
  layout.shape.rows = request.rows;
  layout.shape.cols = request.cols;
  layout.shape.tensor = &codes;
  layout.shape.stored_bytes = layout.place.ShareOf(codes);
  return layout;
}

absl::Status AddScales(const Tensor& scale, int64_t scale_rows, int64_t group_columns,
                       RowMajorLayout& layout) {
  const int64_t columns = group_columns == 0 ? layout.shape.cols : group_columns;
  layout.scale = &scale;
  layout.scale_rows = scale_rows;
  layout.scale_width = DivideUp(layout.shape.cols, columns);
  layout.shape.group_columns = static_cast<uint32_t>(group_columns);
  layout.shape.stored_bytes += layout.place.ShareOf(scale);
  if (scale_rows == 0) {
    if (scale.view.Elements() == 1) return absl::OkStatus();
    return TensorError(scale, absl::StrCat("shape is ", ShapeText(scale.view),
                                           ", expected one scale for the tensor"));
  }
  if (layout.scale_width == 1 && layout.place.IsColumn(scale, scale_rows)) return absl::OkStatus();
  return layout.place.Check(scale, scale_rows, layout.scale_width,
                            scale_rows == 1 ? absl::StrCat("groups of ", columns)
                                            : absl::StrCat("blocks of ", scale_rows, "x", columns));
}

SourceOr OpenMatrix(const MatrixRequest& request) {
  if (request.rows <= 0 || request.cols <= 0 ||
      request.cols > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a weight of ", request.rows, " rows and ", request.cols, " columns"));
  }
  if (const Tensor* weight = request.checkpoint.Find(request.weight_name)) {
    if (weight->gguf != nullptr) return OpenGgufMatrix(*weight, request.rows, request.cols);
    return OpenByDType(request, *weight);
  }
  const auto [tensor, container] = FindContainer(request.checkpoint, request.weight_name);
  if (tensor != nullptr) return container->open(request, *tensor);
  return request.checkpoint.Get(request.weight_name).status();
}

const Tensor* FindWeight(const Checkpoint& checkpoint, std::string_view weight_name) {
  if (const Tensor* weight = checkpoint.Find(weight_name)) return weight;
  return FindContainer(checkpoint, weight_name).first;
}

}  // namespace tandem
