#include "tests/bench/random_experts.h"

#include <algorithm>
#include <cstring>

#include "common/base/check.h"
#include "expert_worker/kernels/formats.h"

namespace tandem::bench {
namespace {

using kernels::CodeStorage;
using kernels::MinType;
using kernels::ScaleType;
using kernels::SuperType;

// Numerical Recipes' generator: one multiply-add a number.
constexpr uint32_t Next(uint32_t state) { return state * 1664525u + 1013904223u; }

uint32_t SeedOf(const expert::ExpertMatrix& m, Range rows) {
  return static_cast<uint32_t>(m.layer * 104729 + m.expert * 7919 + static_cast<int>(m.part) * 31 +
                               rows.begin);
}

// The bits of a code that are random, and those that are set.
struct CodeBits {
  uint8_t random;
  uint8_t set;
};

CodeBits BitsOf(CodeStorage codes) {
  switch (codes) {
    case CodeStorage::kE4m3:
      return {0x8F, 0x30};  // magnitudes from 1/2 to 2: no NaN
    case CodeStorage::k8:
      return {0xFF, 0};
    case CodeStorage::k6:
      return {0x3F, 0};
    case CodeStorage::k5:
      return {0x1F, 0};
    case CodeStorage::k4:
      return {0x0F, 0};
    case CodeStorage::k3:
      return {0x07, 0};
    case CodeStorage::k2:
      return {0x03, 0};
    default:
      return {0, 0};  // plain: no codes
  }
}

// Steps of about 2^-7, offsets that put the middle code near zero.
GroupParameters SmallParameters(const kernels::FormatTraits& traits) {
  GroupParameters p;
  switch (traits.scale) {
    case ScaleType::kNone:
      break;
    case ScaleType::kF32:
      p.scale = 0x3C000000;
      break;
    case ScaleType::kBf16:
      p.scale = 0x3C00;
      break;
    case ScaleType::kF16:
      p.scale = 0x2000;
      break;
    case ScaleType::kE8m0:
      p.scale = 120;
      break;
    case ScaleType::kE4m3:
      p.scale = 0x38;
      break;
    case ScaleType::kU8:
    case ScaleType::kI8:
    case ScaleType::kU4Pair:
    case ScaleType::kI8Pair:
      p.scale = 9;
      break;
  }
  if (traits.min == MinType::kF16) p.min = 0xAC00;
  if (traits.min == MinType::kZeroPoint || HasSuperMin(traits)) p.min = 8;
  if (traits.min == MinType::kZeroPoint && traits.codes == CodeStorage::k8) p.min = 128;
  if (traits.super == SuperType::kF16) p.super = 0x1400;
  if (traits.super == SuperType::kF16Pair) p.super = 0x14001400;
  if (traits.super == SuperType::kF32Row) p.super = 0x3C000000;
  return p;
}

// Of either sign, 2^-7 <= |value| < 2^-6.
constexpr uint32_t SmallFloat(uint32_t state) {
  return 0x3C000000u | ((state >> 9) & 0x007F0000u) | (state & 0x80000000u);
}
constexpr uint16_t SmallHalf(uint32_t state) {
  return static_cast<uint16_t>(0x2000u | ((state >> 20) & 0x3FFu) | ((state >> 16) & 0x8000u));
}

}  // namespace

absl::Status RandomExperts::ReadElements(const expert::ExpertMatrix& matrix, Range rows, Range cols,
                                         WeightFormat plain, void* out) const {
  const int64_t count = rows.size() * cols.size();
  uint32_t state = SeedOf(matrix, rows);
  for (int64_t i = 0; i < count; ++i) {
    state = Next(state);
    if (plain == WeightFormat::kF32) {
      static_cast<uint32_t*>(out)[i] = SmallFloat(state);
    } else if (plain == WeightFormat::kBf16) {
      static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(SmallFloat(state) >> 16);
    } else {
      static_cast<uint16_t*>(out)[i] = SmallHalf(state);
    }
  }
  return absl::OkStatus();
}

absl::Status RandomExperts::ReadCodes(const expert::ExpertMatrix& matrix, Range rows, Range cols,
                                      uint8_t* codes, GroupParameters* groups) const {
  const kernels::FormatTraits& traits = kernels::TraitsOf(format_.format);
  const CodeBits bits = BitsOf(traits.codes);
  const uint32_t random = bits.random * 0x01010101u;
  const uint32_t set = bits.set * 0x01010101u;
  const int64_t count = rows.size() * cols.size();
  uint32_t state = SeedOf(matrix, rows);
  for (int64_t i = 0; i < count; i += 4) {
    state = Next(state);
    // The upper half of a state is the random one.
    const uint32_t four = ((state ^ (state >> 15)) & random) | set;
    std::memcpy(codes + i, &four, static_cast<size_t>(std::min<int64_t>(4, count - i)));
  }
  const uint32_t groups_in_row = GroupsTouched(
      static_cast<uint32_t>(cols.begin), static_cast<uint32_t>(cols.end), format_.group_columns);
  std::fill_n(groups, rows.size() * groups_in_row, SmallParameters(traits));
  return absl::OkStatus();
}

absl::Status RandomExperts::ReadBias(const expert::ExpertMatrix&, Range rows, float* out) const {
  std::fill_n(out, rows.size(), 0.125f);
  return absl::OkStatus();
}

}  // namespace tandem::bench
