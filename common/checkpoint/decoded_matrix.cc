#include "common/checkpoint/decoded_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";

int64_t DivideUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

const Checkpoint::Tensor* FindScale(const Checkpoint& checkpoint, std::string_view weight_name) {
  const std::string name(weight_name);
  if (const auto* tensor = checkpoint.Find(name + "_scale_inv")) return tensor;
  if (!weight_name.ends_with(kWeightSuffix)) return nullptr;
  return checkpoint.Find(name.substr(0, name.size() - kWeightSuffix.size()) + ".scale");
}

absl::Status CheckScale(const Checkpoint::Tensor& scale, int64_t rows, int64_t cols,
                        ScaleBlock block) {
  const DType dtype = scale.view.dtype;
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF8E8M0) {
    return TensorError(scale, absl::StrCat("scales of dtype ", std::string(DTypeName(dtype)),
                                           " are not supported"));
  }
  const int64_t want_rows = DivideUp(rows, block.rows);
  const int64_t want_cols = DivideUp(cols, block.cols);
  if (scale.view.rank != 2 || scale.view.shape[0] != want_rows ||
      scale.view.shape[1] != want_cols) {
    return TensorError(
        scale, absl::StrCat("shape is ", ShapeText(scale.view), ", blocks of ", block.rows, "x",
                            block.cols, " need [", want_rows, ",", want_cols, "]"));
  }
  return absl::OkStatus();
}

const uint8_t* At(const Checkpoint::Tensor& tensor, int64_t row, int64_t col) {
  return tensor.view.As<const uint8_t>() +
         static_cast<size_t>(row * tensor.view.shape[1] + col) * DTypeBytes(tensor.view.dtype);
}

absl::Status NonFiniteError(const Checkpoint::Tensor& tensor, int64_t row, int64_t col) {
  return TensorError(tensor, absl::StrCat("element [", row, ",", col, "] is not a finite number"));
}

}  // namespace

absl::StatusOr<DecodedMatrix> DecodedMatrix::Create(const Checkpoint& checkpoint,
                                                    std::string_view weight_name, int64_t rows,
                                                    int64_t cols, ScaleBlock block) {
  DecodedMatrix matrix;
  const int64_t shape[] = {rows, cols};
  ASSIGN_OR_RETURN(matrix.weight_, checkpoint.Get(weight_name, shape));
  matrix.rows_ = rows;
  matrix.cols_ = cols;
  const DType dtype = matrix.weight_->view.dtype;
  if (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16) return matrix;
  if (dtype != DType::kF8E4M3) {
    return TensorError(*matrix.weight_, absl::StrCat("dtype ", std::string(DTypeName(dtype)),
                                                     " is not supported for a weight"));
  }
  if (block.rows <= 0 || block.cols <= 0) {
    return absl::InvalidArgumentError("the block of FP8 scales must have positive sides");
  }
  matrix.block_ = block;
  matrix.scale_ = FindScale(checkpoint, weight_name);
  if (matrix.scale_ == nullptr) {
    return TensorError(
        *matrix.weight_,
        absl::StrCat("is F8_E4M3 but its scales ",
                     QuoteForMessage(std::string(weight_name) + "_scale_inv"), " are missing"));
  }
  RETURN_IF_ERROR(CheckScale(*matrix.scale_, rows, cols, block));
  return matrix;
}

DType DecodedMatrix::native_dtype() const {
  return weight_->view.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

uint64_t DecodedMatrix::stored_bytes() const {
  uint64_t bytes = weight_->view.Elements() * DTypeBytes(weight_->view.dtype);
  if (scale_ != nullptr) bytes += scale_->view.Elements() * DTypeBytes(scale_->view.dtype);
  return bytes;
}

absl::Status DecodedMatrix::CheckRange(Range rows, Range cols, size_t out_elements) const {
  const bool inside = rows.begin >= 0 && rows.begin <= rows.end && rows.end <= rows_ &&
                      cols.begin >= 0 && cols.begin <= cols.end && cols.end <= cols_;
  if (inside && out_elements == static_cast<size_t>(rows.size() * cols.size())) {
    return absl::OkStatus();
  }
  return TensorError(*weight_, absl::StrCat("rows [", rows.begin, ",", rows.end, ") x columns [",
                                            cols.begin, ",", cols.end, ") into ", out_elements,
                                            " elements do not fit ", ShapeText(weight_->view)));
}

absl::Status DecodedMatrix::ReadF32(Range rows, Range cols, std::span<float> out) const {
  RETURN_IF_ERROR(CheckRange(rows, cols, out.size()));
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    RETURN_IF_ERROR(ReadRow(row, cols, out.data() + (row - rows.begin) * cols.size()));
  }
  return absl::OkStatus();
}

absl::Status DecodedMatrix::ReadBf16(Range rows, Range cols, std::span<uint16_t> out) const {
  RETURN_IF_ERROR(CheckRange(rows, cols, out.size()));
  const bool plain = weight_->view.dtype == DType::kBF16;
  std::vector<float> decoded(plain ? 0 : static_cast<size_t>(cols.size()));
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    uint16_t* const to = out.data() + (row - rows.begin) * cols.size();
    if (plain) {
      const uint8_t* const from = At(*weight_, row, cols.begin);
      if (const auto bad = FindNonFiniteBf16(from, cols.size())) {
        return NonFiniteError(*weight_, row, cols.begin + *bad);
      }
      if (cols.size() > 0) std::memcpy(to, from, static_cast<size_t>(cols.size()) * sizeof(*to));
      continue;
    }
    RETURN_IF_ERROR(ReadRow(row, cols, decoded.data()));
    ConvertF32ToBf16(decoded.data(), cols.size(), to);
    if (const auto bad = FindNonFiniteBf16(to, cols.size())) {
      return TensorError(*weight_, absl::StrCat("element [", row, ",", cols.begin + *bad,
                                                "] is beyond the range of BF16"));
    }
  }
  return absl::OkStatus();
}

absl::Status DecodedMatrix::ReadRow(int64_t row, Range cols, float* out) const {
  if (scale_ != nullptr) return ReadScaledRow(row, cols, out);
  ConvertToF32(weight_->view.dtype, At(*weight_, row, cols.begin), cols.size(), out);
  if (const auto bad = FindNonFinite(out, cols.size())) {
    return NonFiniteError(*weight_, row, cols.begin + *bad);
  }
  return absl::OkStatus();
}

absl::Status DecodedMatrix::ReadScaledRow(int64_t row, Range cols, float* out) const {
  const int64_t scale_row = row / block_.rows;
  for (int64_t begin = cols.begin; begin < cols.end;) {
    const int64_t scale_col = begin / block_.cols;
    const int64_t end = std::min(cols.end, (scale_col + 1) * block_.cols);
    float scale = 0;
    ConvertToF32(scale_->view.dtype, At(*scale_, scale_row, scale_col), 1, &scale);
    if (!std::isfinite(scale)) return NonFiniteError(*scale_, scale_row, scale_col);
    float* const to = out + (begin - cols.begin);
    const int64_t count = end - begin;
    ConvertToF32(DType::kF8E4M3, At(*weight_, row, begin), count, to);
    if (const auto bad = FindNonFinite(to, count)) {
      return TensorError(*weight_, absl::StrCat("element [", row, ",", begin + *bad,
                                                "] holds a NaN code of FP8 E4M3"));
    }
    for (int64_t i = 0; i < count; ++i) to[i] *= scale;
    if (const auto bad = FindNonFinite(to, count)) {
      return TensorError(*weight_, absl::StrCat("element [", row, ",", begin + *bad,
                                                "] times its scale overflows F32"));
    }
    begin = end;
  }
  return absl::OkStatus();
}

}  // namespace tandem
