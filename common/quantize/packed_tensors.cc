#include "common/quantize/packed_tensors.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"

namespace tandem {
namespace {

constexpr int64_t kNibblesPerWord = 8;

int64_t DivideUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

template <typename T>
void Append(std::string* bytes, T value) {
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));  // all machines that this runs on are little-endian
  bytes->append(raw, sizeof(T));
}

// `count` codes, `stride` apart, in whole words.
void AppendNibbleWord(const uint8_t* codes, int64_t count, std::string* bytes) {
  uint32_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= uint32_t{codes[i]} << (4 * i);
  Append(bytes, word);
}

std::string PackNibbleWords(const uint8_t* codes, int64_t rows, int64_t cols) {
  std::string bytes;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; col += kNibblesPerWord) {
      AppendNibbleWord(codes + row * cols + col, std::min(kNibblesPerWord, cols - col), &bytes);
    }
  }
  return bytes;
}

std::string PackNibblePairs(const uint8_t* codes, int64_t rows, int64_t cols) {
  std::string bytes;
  for (int64_t i = 0; i < rows * cols; i += 2) {
    bytes.push_back(static_cast<char>(codes[i] | codes[i + 1] << 4));
  }
  return bytes;
}

std::string PackZeroPoints(const GroupParameters* groups, int64_t rows, int64_t groups_in_row) {
  std::string bytes;
  for (int64_t row = 0; row < rows; row += kNibblesPerWord) {
    const int64_t count = std::min(kNibblesPerWord, rows - row);
    for (int64_t group = 0; group < groups_in_row; ++group) {
      uint8_t zeros[kNibblesPerWord];
      for (int64_t i = 0; i < count; ++i) {
        zeros[i] = static_cast<uint8_t>(groups[(row + i) * groups_in_row + group].min);
      }
      AppendNibbleWord(zeros, count, &bytes);
    }
  }
  return bytes;
}

std::string PackScales(const EncodeTarget& target, const GroupParameters* groups, int64_t rows,
                       int64_t groups_in_row) {
  std::string bytes;
  for (int64_t row = 0; row < rows; row += target.group_rows) {
    for (int64_t group = 0; group < groups_in_row; ++group) {
      const uint32_t scale = groups[row * groups_in_row + group].scale;
      if (target.format == WeightFormat::kMxfp4) {
        bytes.push_back(static_cast<char>(scale));
      } else if (target.format == WeightFormat::kFp8) {
        Append(&bytes, static_cast<uint16_t>(scale >> 16));  // a BF16 value as F32
      } else {
        Append(&bytes, static_cast<uint16_t>(scale));
      }
    }
  }
  return bytes;
}

bool IsInt4(WeightFormat format) {
  return format == WeightFormat::kInt4Bf16 || format == WeightFormat::kInt4ZeroBf16;
}

}  // namespace

uint64_t PackedTensor::StrideBytes() const {
  uint64_t bytes = DTypeBytes(dtype);
  for (size_t i = 1; i < shape.size(); ++i) bytes *= static_cast<uint64_t>(shape[i]);
  return bytes;
}

std::optional<uint64_t> PackedTensor::OffsetOf(int64_t first_row) const {
  if (rows_per_index > 0) return static_cast<uint64_t>(first_row / rows_per_index) * StrideBytes();
  return first_row == 0 ? std::optional<uint64_t>(0) : std::nullopt;
}

absl::Status CheckPackable(const EncodeTarget& target, int64_t rows, int64_t cols) {
  if (rows <= 0 || cols <= 0) return absl::InvalidArgumentError("an empty matrix");
  const int64_t group = target.group_columns;
  // Blocks may be ragged: every reader of block scales divides and rounds up.
  if (group > 0 && target.group_rows == 1 && cols % group != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(cols, " columns are not divisible into groups of ", group));
  }
  if (IsInt4(target.format) && cols % kNibblesPerWord != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(cols, " columns do not fill words of ", kNibblesPerWord, " four-bit codes"));
  }
  return absl::OkStatus();
}

std::vector<PackedTensor> PackedTensors(const EncodeTarget& target, int64_t rows, int64_t cols) {
  const int64_t groups = GroupsInRow(cols, target);
  const PackedTensor scale = {
      "weight_scale", DType::kBF16, {DivideUp(rows, target.group_rows), groups}, target.group_rows};
  switch (target.format) {
    case WeightFormat::kInt8Bf16:
      return {{"weight", DType::kI8, {rows, cols}}, scale};
    case WeightFormat::kFp8:
      return {{"weight", DType::kF8E4M3, {rows, cols}}, scale};
    case WeightFormat::kMxfp4:
      return {{"weight_packed", DType::kU8, {rows, cols / 2}},
              {"weight_scale", DType::kU8, {rows, groups}}};
    default:
      break;
  }
  TANDEM_CHECK(IsInt4(target.format));
  std::vector<PackedTensor> tensors = {
      {"weight_packed", DType::kI32, {rows, DivideUp(cols, kNibblesPerWord)}},
      scale,
      {"weight_shape", DType::kI64, {2}, 0}};
  if (target.format == WeightFormat::kInt4ZeroBf16) {
    tensors.push_back({"weight_zero_point",
                       DType::kI32,
                       {DivideUp(rows, kNibblesPerWord), groups},
                       kNibblesPerWord});
  }
  return tensors;
}

std::vector<std::string> PackRows(const EncodeTarget& target, int64_t matrix_rows, int64_t cols,
                                  int64_t rows, const uint8_t* codes,
                                  const GroupParameters* groups) {
  const int64_t groups_in_row = GroupsInRow(cols, target);
  std::string scales = PackScales(target, groups, rows, groups_in_row);
  if (target.format == WeightFormat::kMxfp4) {
    return {PackNibblePairs(codes, rows, cols), std::move(scales)};
  }
  if (!IsInt4(target.format)) {
    const auto* const bytes = reinterpret_cast<const char*>(codes);
    return {std::string(bytes, static_cast<size_t>(rows * cols)), std::move(scales)};
  }
  std::string shape;
  Append(&shape, matrix_rows);
  Append(&shape, cols);
  std::vector<std::string> packed = {PackNibbleWords(codes, rows, cols), std::move(scales),
                                     std::move(shape)};
  if (target.format == WeightFormat::kInt4ZeroBf16) {
    packed.push_back(PackZeroPoints(groups, rows, groups_in_row));
  }
  return packed;
}

}  // namespace tandem
