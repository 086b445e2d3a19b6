#include "common/checkpoint/gguf_blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/checkpoint/gguf_names.h"

namespace tandem {
namespace {

constexpr int kMaxBlock = 256;
constexpr int kMaxGroups = 16;  // of a block

uint32_t U16(const uint8_t* at) { return at[0] | uint32_t{at[1]} << 8; }
uint32_t U32(const uint8_t* at) { return U16(at) | U16(at + 2) << 16; }

// The two nibbles of each byte lie half a group apart: low ones first, then high ones.
void UnpackHalves(const uint8_t* bytes, int count, uint8_t* codes) {
  for (int j = 0; j < count; ++j) {
    codes[j] = bytes[j] & 15;
    codes[j + count] = bytes[j] >> 4;
  }
}

void UnpackQ4_0(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  groups[0] = {.scale = U16(block)};
  UnpackHalves(block + 2, 16, codes);
}

void UnpackQ4_1(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  groups[0] = {.scale = U16(block), .min = U16(block + 2)};
  UnpackHalves(block + 4, 16, codes);
}

void AddFifthBits(uint32_t bits, uint8_t* codes) {
  for (int e = 0; e < 32; ++e) codes[e] |= (bits >> e & 1) << 4;
}

void UnpackQ5_0(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  groups[0] = {.scale = U16(block)};
  UnpackHalves(block + 6, 16, codes);
  AddFifthBits(U32(block + 2), codes);
}

void UnpackQ5_1(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  groups[0] = {.scale = U16(block), .min = U16(block + 2)};
  UnpackHalves(block + 8, 16, codes);
  AddFifthBits(U32(block + 4), codes);
}

void UnpackQ8_0(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  groups[0] = {.scale = U16(block)};
  std::memcpy(codes, block + 2, 32);
}

// Two bits a column, four columns of a byte 32 apart, two halves of 128 (Q2_K, Q3_K).
void UnpackPairs(const uint8_t* bytes, uint8_t* codes) {
  for (int half = 0; half < 2; ++half) {
    for (int step = 0; step < 4; ++step) {
      for (int l = 0; l < 32; ++l) {
        codes[128 * half + 32 * step + l] = bytes[32 * half + l] >> (2 * step) & 3;
      }
    }
  }
}

void UnpackQ2K(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  const uint32_t super = U32(block + 80);
  for (int g = 0; g < 16; ++g) {
    groups[g] = {.scale = block[g] & 15u, .min = uint32_t{block[g]} >> 4, .super = super};
  }
  UnpackPairs(block + 16, codes);
}

void UnpackQ3K(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  const uint8_t* const high = block;
  const uint8_t* const scales = block + 96;
  const uint32_t super = U16(block + 108);
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
    const int top = scales[8 + g % 4] >> (2 * (g / 4)) & 3;
    groups[g] = {.scale = static_cast<uint8_t>((low | top << 4) - 32), .super = super};
  }
  UnpackPairs(block + 32, codes);
  for (int e = 0; e < 256; ++e) codes[e] |= (high[e % 32] >> (e / 32) & 1) << 2;
}

// Six-bit scales and minima of Q4_K and Q5_K, d and dmin before them.
void UnpackScalesAndMinima(const uint8_t* block, GroupParameters* groups) {
  const uint32_t super = U32(block);
  const uint8_t* const sc = block + 4;
  for (int j = 0; j < 8; ++j) {
    GroupParameters& group = groups[j];
    group.super = super;
    if (j < 4) {
      group.scale = sc[j] & 63;
      group.min = sc[j + 4] & 63;
    } else {
      group.scale = static_cast<uint32_t>((sc[j + 4] & 15) | (sc[j - 4] >> 6) << 4);
      group.min = static_cast<uint32_t>((sc[j + 4] >> 4) | (sc[j] >> 6) << 4);
    }
  }
}

void UnpackQ4K(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  UnpackScalesAndMinima(block, groups);
  for (int pair = 0; pair < 4; ++pair) {
    UnpackHalves(block + 16 + 32 * pair, 32, codes + 64 * pair);
  }
}

void UnpackQ5K(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  UnpackScalesAndMinima(block, groups);
  const uint8_t* const high = block + 16;
  for (int pair = 0; pair < 4; ++pair) {
    UnpackHalves(block + 48 + 32 * pair, 32, codes + 64 * pair);
  }
  for (int e = 0; e < 256; ++e) codes[e] |= (high[e % 32] >> (e / 32) & 1) << 4;
}

void UnpackQ6K(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  const uint32_t super = U16(block + 208);
  for (int g = 0; g < 16; ++g) groups[g] = {.scale = block[192 + g], .super = super};
  for (int half = 0; half < 2; ++half) {
    const uint8_t* const low = block + 64 * half;
    const uint8_t* const high = block + 128 + 32 * half;
    uint8_t* const out = codes + 128 * half;
    UnpackHalves(low, 64, out);
    for (int e = 0; e < 128; ++e) out[e] |= (high[e % 32] >> (2 * (e / 32)) & 3) << 4;
  }
}

void UnpackIq4Xs(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  const uint32_t super = U16(block);
  const uint32_t high = U16(block + 2);
  for (int g = 0; g < 8; ++g) {
    const int low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
    const int top = static_cast<int>(high >> (2 * g) & 3);
    groups[g] = {.scale = static_cast<uint8_t>((low | top << 4) - 32), .super = super};
    UnpackHalves(block + 8 + 16 * g, 16, codes + 32 * g);
  }
}

void UnpackMxfp4(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  groups[0] = {.scale = block[0]};
  UnpackHalves(block + 1, 16, codes);
}

// The scales are E4M3 without a sign: their top bit means nothing.
void UnpackNvfp4(const uint8_t* block, uint8_t* codes, GroupParameters* groups) {
  for (int g = 0; g < 4; ++g) {
    groups[g] = {.scale = block[g] & 127u, .super = std::bit_cast<uint32_t>(1.0f)};
    UnpackHalves(block + 4 + 8 * g, 8, codes + 16 * g);
  }
}

constexpr std::pair<GgufType, GgufBlockFormat> kFormats[] = {
    {GgufType::kF32, {WeightFormat::kF32, 0, nullptr}},
    {GgufType::kF16, {WeightFormat::kF16, 0, nullptr}},
    {GgufType::kBf16, {WeightFormat::kBf16, 0, nullptr}},
    {GgufType::kQ4_0, {WeightFormat::kInt4F16, 32, UnpackQ4_0}},
    {GgufType::kQ4_1, {WeightFormat::kQ4_1, 32, UnpackQ4_1}},
    {GgufType::kQ5_0, {WeightFormat::kQ5_0, 32, UnpackQ5_0}},
    {GgufType::kQ5_1, {WeightFormat::kQ5_1, 32, UnpackQ5_1}},
    {GgufType::kQ8_0, {WeightFormat::kInt8F16, 32, UnpackQ8_0}},
    {GgufType::kQ2K, {WeightFormat::kQ2K, 16, UnpackQ2K}},
    {GgufType::kQ3K, {WeightFormat::kQ3K, 16, UnpackQ3K}},
    {GgufType::kQ4K, {WeightFormat::kQ4K, 32, UnpackQ4K}},
    {GgufType::kQ5K, {WeightFormat::kQ5K, 32, UnpackQ5K}},
    {GgufType::kQ6K, {WeightFormat::kQ6K, 16, UnpackQ6K}},
    {GgufType::kIq4Nl, {WeightFormat::kIq4Nl, 32, UnpackQ4_0}},  // same layout, other values
    {GgufType::kIq4Xs, {WeightFormat::kIq4Xs, 32, UnpackIq4Xs}},
    {GgufType::kMxfp4, {WeightFormat::kMxfp4, 32, UnpackMxfp4}},
    {GgufType::kNvfp4, {WeightFormat::kNvfp4, 16, UnpackNvfp4}},
};

class GgufMatrix : public MatrixSource {
 public:
  GgufMatrix(const Checkpoint::Tensor& tensor, int64_t rows)
      : tensor_(tensor), gguf_(*tensor.gguf), format_(FormatOf(gguf_.type->type)), rows_(rows) {}

  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return gguf_.row_elements(); }
  WeightFormat format() const override { return format_.format; }
  uint32_t group_columns() const override { return format_.group_columns; }
  uint64_t stored_bytes() const override {
    return static_cast<uint64_t>(rows_) * gguf_.row_bytes();
  }
  const Checkpoint::Tensor& tensor() const override { return tensor_; }

  absl::Status ReadElements(Range rows, Range cols, void* out) const override {
    if (format_.unpack != nullptr) return MatrixSource::ReadElements(rows, cols, out);
    const size_t element = gguf_.type->block_bytes;
    const size_t bytes = static_cast<size_t>(cols.size()) * element;
    auto* to = static_cast<uint8_t*>(out);
    for (int64_t row = rows.begin; row < rows.end && bytes > 0; ++row, to += bytes) {
      std::memcpy(to, RowData(row) + static_cast<size_t>(cols.begin) * element, bytes);
    }
    return absl::OkStatus();
  }

  absl::Status ReadCodes(Range rows, Range cols, uint8_t* codes,
                         GroupParameters* groups) const override {
    if (format_.unpack == nullptr) return MatrixSource::ReadCodes(rows, cols, codes, groups);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      ReadRow(RowData(row), cols, &codes, &groups);
    }
    return absl::OkStatus();
  }

 private:
  const uint8_t* RowData(int64_t row) const {
    return gguf_.data + static_cast<uint64_t>(tensor_.gguf_first_row +
                                              PairedRow(row, tensor_.gguf_paired_rows)) *
                            gguf_.row_bytes();
  }

  // Moves both outputs past what it wrote.
  void ReadRow(const uint8_t* row, Range cols, uint8_t** codes, GroupParameters** groups) const {
    const int64_t columns = gguf_.type->block_elements;
    const int64_t group_columns = format_.group_columns;
    uint8_t block_codes[kMaxBlock];
    GroupParameters block_groups[kMaxGroups];
    for (int64_t begin = cols.begin; begin < cols.end;) {
      const int64_t block = begin / columns;
      const int64_t end = std::min(cols.end, (block + 1) * columns);
      format_.unpack(row + block * gguf_.type->block_bytes, block_codes, block_groups);
      const int64_t first = begin - block * columns;
      const int64_t last = end - block * columns;
      *codes = std::copy(block_codes + first, block_codes + last, *codes);
      *groups = std::copy(block_groups + first / group_columns,
                          block_groups + (last - 1) / group_columns + 1, *groups);
      begin = end;
    }
  }

  const Checkpoint::Tensor& tensor_;
  const GgufTensor& gguf_;
  const GgufBlockFormat& format_;
  const int64_t rows_;
};

}  // namespace

const GgufBlockFormat& FormatOf(GgufType type) {
  for (const auto& [known, format] : kFormats) {
    if (known == type) return format;
  }
  TANDEM_CHECK(false);
  return kFormats[0].second;
}

absl::StatusOr<std::shared_ptr<const MatrixSource>> OpenGgufMatrix(const Checkpoint::Tensor& tensor,
                                                                   int64_t rows, int64_t cols) {
  TANDEM_CHECK(tensor.gguf != nullptr);
  const TensorView& view = tensor.view;
  if (view.rank != 2 || view.shape[0] != rows || view.shape[1] != cols) {
    return TensorError(
        tensor, absl::StrCat("shape is ", ShapeText(view), ", expected [", rows, ",", cols, "]"));
  }
  return std::make_shared<GgufMatrix>(tensor, rows);
}

}  // namespace tandem
