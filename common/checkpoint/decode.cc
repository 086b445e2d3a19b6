#include "common/checkpoint/decode.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/base/check.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

float LowF16(uint32_t bits) { return F16ToF32(static_cast<uint16_t>(bits)); }
float HighF16(uint32_t bits) { return F16ToF32(static_cast<uint16_t>(bits >> 16)); }
int Signed(uint32_t bits) { return static_cast<int8_t>(bits); }
float Real(int value) { return static_cast<float>(value); }

// One row's codes, cut into runs of one group.
struct Row {
  const uint8_t* codes;
  int64_t count;
  const GroupParameters* groups;
  uint32_t group_columns;
  int64_t first_column;
  float* out;
};

// `prepare` turns a group into the function from its codes to their values.
template <typename Prepare>
void DecodeRow(const Row& row, Prepare prepare) {
  for (int64_t begin = 0, group = 0; begin < row.count; ++group) {
    int64_t end = row.count;
    if (row.group_columns != 0) {
      const int64_t within = (row.first_column + begin) % row.group_columns;
      const int64_t run = row.group_columns - within;
      if (begin + run < end) end = begin + run;
    }
    const auto value = prepare(row.groups[group]);
    for (int64_t i = begin; i < end; ++i) row.out[i] = value(row.codes[i]);
    begin = end;
  }
}

void DecodeIntegers(const Row& row, WeightFormat format) {
  const bool is_signed = format <= WeightFormat::kInt8F16;
  const bool has_zero = format >= WeightFormat::kInt4ZeroF32;
  DecodeRow(row, [=](const GroupParameters& g) {
    const float scale = IntegerScale(format, g);
    const int zero = is_signed ? 0 : has_zero ? static_cast<int>(g.min) : 8;
    return [=](uint8_t c) {
      return DecodeInteger(is_signed ? static_cast<int8_t>(c) : static_cast<int>(c), zero, scale);
    };
  });
}

// Formats with an own scale, not relative to a super-block's.
void DecodeFloats(const Row& row, WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float scale = std::bit_cast<float>(g.scale);
        return [=](uint8_t c) { return kE4m3ToF32[c] * scale; };
      });
    case WeightFormat::kMxfp8:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float scale = E8m0ToF32(static_cast<uint8_t>(g.scale));
        return [=](uint8_t c) { return kE4m3ToF32[c] * scale; };
      });
    case WeightFormat::kMxfp4:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float scale = E8m0ToF32(static_cast<uint8_t>(g.scale));
        return [=](uint8_t c) { return kE2m1Values[c] * scale; };
      });
    case WeightFormat::kNvfp4:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float scale =
            kE4m3ToF32[static_cast<uint8_t>(g.scale)] * std::bit_cast<float>(g.super);
        return [=](uint8_t c) { return kE2m1Values[c] * scale; };
      });
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_1:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float d = LowF16(g.scale), m = LowF16(g.min);
        return [=](uint8_t c) { return d * Real(c) + m; };
      });
    case WeightFormat::kQ5_0:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float d = LowF16(g.scale);
        return [=](uint8_t c) { return DecodeInteger(c, 16, d); };
      });
    case WeightFormat::kIq4Nl:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float d = LowF16(g.scale);
        return [=](uint8_t c) { return Real(kIq4NlValues[c]) * d; };
      });
    default:
      TANDEM_CHECK(false && "decode: not a quantized format");
  }
}

// Scales of groups relative to the d (and dmin) of a super-block.
void DecodeSuperBlocks(const Row& row, WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ2K:
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
      return DecodeRow(row, [](const GroupParameters& g) {
        const float scale = LowF16(g.super) * Real(static_cast<int>(g.scale));
        const float min = HighF16(g.super) * Real(static_cast<int>(g.min));
        return [=](uint8_t c) { return scale * Real(c) - min; };
      });
    case WeightFormat::kQ3K:
    case WeightFormat::kQ6K:
      return DecodeRow(row,
                       [middle = format == WeightFormat::kQ3K ? 4 : 32](const GroupParameters& g) {
                         const float scale = LowF16(g.super) * Real(Signed(g.scale));
                         return [=](uint8_t c) { return DecodeInteger(c, middle, scale); };
                       });
    default:  // kIq4Xs
      return DecodeRow(row, [](const GroupParameters& g) {
        const float scale = LowF16(g.super) * Real(Signed(g.scale));
        return [=](uint8_t c) { return scale * Real(kIq4NlValues[c]); };
      });
  }
}

bool IsInteger(WeightFormat format) {
  return (format >= WeightFormat::kInt8F32 && format <= WeightFormat::kInt4ZeroF16) ||
         (format >= WeightFormat::kInt8ZeroF32 && format <= WeightFormat::kInt8ZeroF16);
}

bool HasSuperBlocks(WeightFormat format) {
  return (format >= WeightFormat::kQ2K && format <= WeightFormat::kQ6K) ||
         format == WeightFormat::kIq4Xs;
}

bool IsFiniteF16(uint32_t bits) { return (bits & 0x7c00) != 0x7c00; }

// Whether the bits alone show that no code can overflow, as they do but for absurd groups. F16
// scales need only be finite: 65504 times the largest scale and code of any format is far from
// 2^128.
bool IsPlainlyUsable(WeightFormat format, const GroupParameters& group) {
  constexpr uint32_t kMuchBelowOverflow = 0xf0;  // 2^113; codes and inner scales reach 448 * 6
  switch (format) {
    case WeightFormat::kFp8:
    case WeightFormat::kInt8F32:
    case WeightFormat::kInt4F32:
    case WeightFormat::kInt4ZeroF32:
    case WeightFormat::kInt8ZeroF32:
      return ((group.scale >> 23) & 0xff) < kMuchBelowOverflow;
    case WeightFormat::kInt8Bf16:
    case WeightFormat::kInt4Bf16:
    case WeightFormat::kInt4ZeroBf16:
    case WeightFormat::kInt8ZeroBf16:
      return ((group.scale >> 7) & 0xff) < kMuchBelowOverflow;
    case WeightFormat::kMxfp8:
    case WeightFormat::kMxfp4:
      return group.scale < kMuchBelowOverflow;
    case WeightFormat::kNvfp4:
      return !IsNanE4m3(static_cast<uint8_t>(group.scale)) &&
             ((group.super >> 23) & 0xff) < kMuchBelowOverflow;
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_1:
      return IsFiniteF16(group.scale) && IsFiniteF16(group.min);
    default:
      if (HasSuperBlocks(format)) return IsFiniteF16(group.super) && IsFiniteF16(group.super >> 16);
      return IsFiniteF16(group.scale);
  }
}

}  // namespace

float DecodeInteger(int code, int zero, float scale) { return Real(code - zero) * scale; }

float IntegerScale(WeightFormat format, const GroupParameters& group) {
  switch (format) {
    case WeightFormat::kInt8F32:
    case WeightFormat::kInt4F32:
    case WeightFormat::kInt4ZeroF32:
    case WeightFormat::kInt8ZeroF32:
      return std::bit_cast<float>(group.scale);
    case WeightFormat::kInt8Bf16:
    case WeightFormat::kInt4Bf16:
    case WeightFormat::kInt4ZeroBf16:
    case WeightFormat::kInt8ZeroBf16:
      return Bf16ToF32(static_cast<uint16_t>(group.scale));
    default:
      TANDEM_DCHECK(IsInteger(format));
      return LowF16(group.scale);
  }
}

void DecodeWeights(WeightFormat format, const uint8_t* codes, int64_t count,
                   const GroupParameters* groups, uint32_t group_columns, int64_t first_column,
                   float* out) {
  const Row row{codes, count, groups, group_columns, first_column, out};
  if (IsInteger(format)) return DecodeIntegers(row, format);
  if (HasSuperBlocks(format)) return DecodeSuperBlocks(row, format);
  DecodeFloats(row, format);
}

float DecodeWeight(WeightFormat format, uint8_t code, const GroupParameters& group) {
  float value = 0;
  DecodeWeights(format, &code, 1, &group, 0, 0, &value);
  return value;
}

int CodeCount(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8:
    case WeightFormat::kMxfp8:
    case WeightFormat::kInt8F32:
    case WeightFormat::kInt8Bf16:
    case WeightFormat::kInt8F16:
    case WeightFormat::kInt8ZeroF32:
    case WeightFormat::kInt8ZeroBf16:
    case WeightFormat::kInt8ZeroF16:
      return 256;
    case WeightFormat::kQ6K:
      return 64;
    case WeightFormat::kQ5_0:
    case WeightFormat::kQ5_1:
    case WeightFormat::kQ5K:
      return 32;
    case WeightFormat::kQ3K:
      return 8;
    case WeightFormat::kQ2K:
      return 4;
    default:
      return 16;
  }
}

bool IsUsableGroup(WeightFormat format, const GroupParameters& group) {
  if (IsPlainlyUsable(format, group)) return true;
  // Magnitudes are largest at the ends of the codes' order, which is not the order of their bits in
  // two's complement and sign-magnitude formats.
  int first = 0, last = CodeCount(format) - 1;
  if (format == WeightFormat::kFp8 || format == WeightFormat::kMxfp8) first = last = 0x7e;
  if (format >= WeightFormat::kInt8F32 && format <= WeightFormat::kInt8F16) first = last = 0x80;
  const auto finite = [&](int code) {
    return std::isfinite(DecodeWeight(format, static_cast<uint8_t>(code), group));
  };
  return finite(first) && finite(last);
}

std::optional<int64_t> FindNanCode(WeightFormat format, const uint8_t* codes, int64_t count) {
  if (format != WeightFormat::kFp8 && format != WeightFormat::kMxfp8) return std::nullopt;
  // Whole blocks first, without an exit inside, which the compiler vectorizes.
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    uint8_t bad = 0;
    for (int64_t i = begin; i < end; ++i) bad |= IsNanE4m3(codes[i]) ? 1 : 0;
    if (bad == 0) continue;
    return std::find_if(codes + begin, codes + end, IsNanE4m3) - codes;
  }
  return std::nullopt;
}

}  // namespace tandem
