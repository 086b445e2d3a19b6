#include "common/checkpoint/weight_matrix.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/checkpoint/decode.h"
#include "common/checkpoint/schemes.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

// Rows decoded at a time: formats that interleave rows in a word (AWQ: 8) are not read eight times,
// and the codes of 32 rows of the widest models (7,168) stay in L2.
constexpr int64_t kRowsAtOnce = 32;

DType ElementType(WeightFormat format) {
  if (format == WeightFormat::kBf16) return DType::kBF16;
  return format == WeightFormat::kF16 ? DType::kF16 : DType::kF32;
}

std::optional<int64_t> FindNonFiniteElement(WeightFormat format, const void* values,
                                            int64_t count) {
  switch (format) {
    case WeightFormat::kBf16:
      return FindNonFiniteBf16(values, count);
    case WeightFormat::kF16:
      return FindNonFiniteF16(values, count);
    default:
      return FindNonFinite(static_cast<const float*>(values), count);
  }
}

}  // namespace

absl::StatusOr<WeightMatrix> WeightMatrix::Create(const Checkpoint& checkpoint,
                                                  std::string_view weight_name, int64_t rows,
                                                  int64_t cols, const QuantScheme& scheme,
                                                  FusedRows fused) {
  ASSIGN_OR_RETURN(std::shared_ptr<const MatrixSource> source,
                   OpenMatrix({checkpoint, weight_name, rows, cols, scheme, fused}));
  return WeightMatrix(std::move(source));
}

WeightMatrix::WeightMatrix(std::shared_ptr<const MatrixSource> source)
    : source_(std::move(source)) {
  TANDEM_CHECK(source_ != nullptr);
}

DType WeightMatrix::native_dtype() const {
  return format() == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32;
}

absl::Status WeightMatrix::NonFinite(int64_t row, int64_t col) const {
  return TensorError(tensor(),
                     absl::StrCat("element [", row, ",", col, "] is not a finite number"));
}

absl::Status WeightMatrix::CheckRange(Range rows, Range cols) const {
  if (rows.begin >= 0 && rows.begin <= rows.end && rows.end <= this->rows() && cols.begin >= 0 &&
      cols.begin <= cols.end && cols.end <= this->cols()) {
    return absl::OkStatus();
  }
  return TensorError(
      tensor(), absl::StrCat("rows ", rows.begin, "-", rows.end, " and columns ", cols.begin, "-",
                             cols.end, " do not fit [", this->rows(), ",", this->cols(), "]"));
}

absl::Status WeightMatrix::CheckOut(Range rows, Range cols, size_t out_elements) const {
  RETURN_IF_ERROR(CheckRange(rows, cols));
  if (out_elements == static_cast<size_t>(rows.size() * cols.size())) return absl::OkStatus();
  return TensorError(tensor(), absl::StrCat("a buffer of ", out_elements, " elements for ",
                                            rows.size(), " rows of ", cols.size()));
}

absl::Status WeightMatrix::CheckGroups(Range rows, Range cols,
                                       const GroupParameters* groups) const {
  const int64_t first = group_columns() == 0 ? 0 : cols.begin / group_columns();
  const int64_t touched = GroupsTouched(static_cast<uint32_t>(cols.begin),
                                        static_cast<uint32_t>(cols.end), group_columns());
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t g = 0; g < touched; ++g) {
      if (IsUsableGroup(format(), *groups++)) continue;
      return source_->GroupError(row, first + g, "is not a finite number of usable size");
    }
  }
  return absl::OkStatus();
}

absl::Status WeightMatrix::ReadElements(Range rows, Range cols, void* out) const {
  RETURN_IF_ERROR(CheckRange(rows, cols));
  RETURN_IF_ERROR(source_->ReadElements(rows, cols, out));
  if (const auto bad = FindNonFiniteElement(format(), out, rows.size() * cols.size())) {
    return NonFinite(rows.begin + *bad / cols.size(), cols.begin + *bad % cols.size());
  }
  return absl::OkStatus();
}

absl::Status WeightMatrix::ReadCodes(Range rows, Range cols, uint8_t* codes,
                                     GroupParameters* groups) const {
  RETURN_IF_ERROR(CheckRange(rows, cols));
  RETURN_IF_ERROR(source_->ReadCodes(rows, cols, codes, groups));
  RETURN_IF_ERROR(CheckGroups(rows, cols, groups));
  if (const auto bad = FindNanCode(format(), codes, rows.size() * cols.size())) {
    return TensorError(
        tensor(), absl::StrCat("element [", rows.begin + *bad / cols.size(), ",",
                               cols.begin + *bad % cols.size(), "] holds a NaN code of FP8 E4M3"));
  }
  return absl::OkStatus();
}

absl::Status WeightMatrix::ReadBlock(Range rows, Range cols, float* out) const {
  const int64_t count = rows.size() * cols.size();
  if (format() == WeightFormat::kF32) return ReadElements(rows, cols, out);
  if (IsPlain(format())) {
    std::vector<uint16_t> elements(static_cast<size_t>(count));
    RETURN_IF_ERROR(ReadElements(rows, cols, elements.data()));
    ConvertToF32(ElementType(format()), elements.data(), count, out);
    return absl::OkStatus();
  }
  const int64_t touched = GroupsTouched(static_cast<uint32_t>(cols.begin),
                                        static_cast<uint32_t>(cols.end), group_columns());
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  std::vector<GroupParameters> groups(static_cast<size_t>(rows.size() * touched));
  RETURN_IF_ERROR(ReadCodes(rows, cols, codes.data(), groups.data()));
  for (int64_t r = 0; r < rows.size(); ++r) {
    DecodeWeights(format(), codes.data() + r * cols.size(), cols.size(),
                  groups.data() + r * touched, group_columns(), cols.begin, out + r * cols.size());
  }
  return absl::OkStatus();
}

absl::Status WeightMatrix::ReadF32(Range rows, Range cols, std::span<float> out) const {
  RETURN_IF_ERROR(CheckOut(rows, cols, out.size()));
  for (int64_t begin = rows.begin; begin < rows.end; begin += kRowsAtOnce) {
    const Range block{begin, std::min(rows.end, begin + kRowsAtOnce)};
    RETURN_IF_ERROR(ReadBlock(block, cols, out.data() + (begin - rows.begin) * cols.size()));
  }
  return absl::OkStatus();
}

absl::Status WeightMatrix::ReadBf16(Range rows, Range cols, std::span<uint16_t> out) const {
  RETURN_IF_ERROR(CheckOut(rows, cols, out.size()));
  if (format() == WeightFormat::kBf16) return ReadElements(rows, cols, out.data());
  std::vector<float> decoded;
  for (int64_t begin = rows.begin; begin < rows.end; begin += kRowsAtOnce) {
    const Range block{begin, std::min(rows.end, begin + kRowsAtOnce)};
    const int64_t count = block.size() * cols.size();
    decoded.resize(static_cast<size_t>(count));
    RETURN_IF_ERROR(ReadF32(block, cols, decoded));
    uint16_t* const to = out.data() + (begin - rows.begin) * cols.size();
    ConvertF32ToBf16(decoded.data(), count, to);
    if (const auto bad = FindNonFiniteBf16(to, count)) {
      return TensorError(
          tensor(), absl::StrCat("element [", begin + *bad / cols.size(), ",",
                                 cols.begin + *bad % cols.size(), "] is beyond the range of BF16"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem
