#pragma once

// The exact F32 value of a packed weight, scalar, as weight_format.h defines it. Used by the
// reference kernels, by unpacking, and (vectorized by the compiler, output by output) by every
// table's exact kernel. In an anonymous namespace on purpose: each instruction set's file compiles
// its own copy with its own flags, and no weak symbol may escape. Files that include this are
// compiled with -ffp-contract=off.

#include <bit>
#include <cstring>

#include "expert_worker/kernels/formats.h"

namespace tandem::kernels {
namespace {

[[maybe_unused]] inline float Bf16Value(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// Every half is exact in F32; the product with 2^112 repairs the exponent, subnormals included.
[[maybe_unused]] inline float F16Value(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7FFFu) << 13;
  const float special = std::bit_cast<float>(magnitude | 0x7F800000u);
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const float value = magnitude >= 0x0F800000u ? special : scaled;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | ((bits & 0x8000u) << 16));
}

// E4M3 (bias 7, no infinities, 0x7F and 0xFF are NaN).
[[maybe_unused]] inline float E4m3Value(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7Fu;
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  const float value = magnitude == 0x7F ? std::bit_cast<float>(0x7FC00000u) : scaled;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | ((bits & 0x80u) << 24));
}

// 2^(bits - 127); 255 is NaN, 0 a subnormal.
[[maybe_unused]] inline float E8m0Value(uint8_t bits) {
  const uint32_t normal = uint32_t{bits} << 23;
  const uint32_t value = bits == 0 ? 0x00400000u : bits == 255 ? 0x7FC00000u : normal;
  return std::bit_cast<float>(value);
}

template <typename T>
inline T LoadAs(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// One panel of packed weights.
struct PanelView {
  const char* data;
  PanelGeometry geometry;
  uint32_t group_columns;

  const char* BlockOf(uint32_t j) const { return data + geometry.BlockOffset(j / kBlockInputs); }
  const BlockGeometry& GeometryOfBlock(uint32_t j) const {
    return geometry.Block(j / kBlockInputs);
  }
  // The scale of input j's group and output o.
  template <FormatTraits T>
  const char* ScaleAt(uint32_t j, uint32_t o) const {
    if (group_columns == 0) return data + geometry.head_scales + o * ScaleBytes(T.scale);
    return BlockOf(j) + GeometryOfBlock(j).scales +
           ScaleOffset(T, j % kBlockInputs / group_columns, o);
  }
  // The first of a group's 32 minima, which take `bytes` each.
  const char* MinsOf(uint32_t j, uint32_t bytes) const {
    if (group_columns == 0) return data + geometry.head_mins;
    const size_t group = j % kBlockInputs / group_columns;
    return BlockOf(j) + GeometryOfBlock(j).mins + group * kPanelWidth * bytes;
  }
};

// d (which = 0) or dmin (1) of input j's super-block, or the row's factor.
template <FormatTraits T>
inline float SuperOf(const PanelView& p, uint32_t j, uint32_t o, uint32_t which) {
  if constexpr (T.super == SuperType::kF32Row) {
    return LoadAs<float>(p.data + o * 4);
  } else {
    return F16Value(LoadAs<uint16_t>(p.BlockOf(j) + o * SuperBytes(T.super) + 2 * which));
  }
}

// The scale of input j's group, supers included.
template <FormatTraits T>
inline float ScaleOf(const PanelView& p, uint32_t j, uint32_t o) {
  const char* at = p.ScaleAt<T>(j, o);
  switch (T.scale) {
    case ScaleType::kNone:
      return 1.0f;
    case ScaleType::kF32:
      return LoadAs<float>(at);
    case ScaleType::kBf16:
      return Bf16Value(LoadAs<uint16_t>(at));
    case ScaleType::kF16:
      return F16Value(LoadAs<uint16_t>(at));
    case ScaleType::kE8m0:
      return E8m0Value(LoadAs<uint8_t>(at));
    case ScaleType::kE4m3:
      return E4m3Value(LoadAs<uint8_t>(at)) * SuperOf<T>(p, j, o, 0);
    case ScaleType::kU8:
      return SuperOf<T>(p, j, o, 0) * static_cast<float>(LoadAs<uint8_t>(at));
    case ScaleType::kI8:
    case ScaleType::kI8Pair:
      return SuperOf<T>(p, j, o, 0) * static_cast<float>(LoadAs<int8_t>(at));
    case ScaleType::kU4Pair:
      return SuperOf<T>(p, j, o, 0) * static_cast<float>(LoadAs<uint8_t>(at) & 15);
  }
  return 0.0f;
}

// The minimum or zero point of input j's group.
template <FormatTraits T>
inline float MinOf(const PanelView& p, uint32_t j, uint32_t o) {
  const char* at = p.MinsOf(j, MinBytes(T.min)) + o * MinBytes(T.min);
  switch (T.min) {
    case MinType::kNone:
      return 0.0f;
    case MinType::kF16:
      return F16Value(LoadAs<uint16_t>(at));
    case MinType::kZeroPoint:
      return static_cast<float>(LoadAs<uint8_t>(at));
    case MinType::kU8:
      return SuperOf<T>(p, j, o, 1) * static_cast<float>(LoadAs<uint8_t>(at));
    case MinType::kU4: {
      const auto both = LoadAs<uint8_t>(p.ScaleAt<T>(j, o));
      return SuperOf<T>(p, j, o, 1) * static_cast<float>(both >> 4);
    }
  }
  return 0.0f;
}

// The stored code of input j, output o (integer formats).
template <FormatTraits T>
inline uint32_t CodeOf(const PanelView& p, uint32_t j, uint32_t o) {
  const char* block = p.BlockOf(j);
  const BlockGeometry& g = p.GeometryOfBlock(j);
  const uint32_t step = j % kBlockInputs / 4;
  const uint32_t byte = 4 * (o % 16) + j % 4;
  const uint32_t half = o / 16;
  const auto at = [&](size_t offset) { return LoadAs<uint8_t>(block + offset); };
  uint32_t code = 0;
  if constexpr (T.codes == CodeStorage::k8) {
    return at(g.codes + size_t{step} * 128 + half * 64 + byte);
  }
  if constexpr (T.codes == CodeStorage::k4 || T.codes == CodeStorage::k5 ||
                T.codes == CodeStorage::k6) {
    code = (at(g.codes + size_t{step} * 64 + byte) >> (4 * half)) & 15u;
  }
  if constexpr (T.codes == CodeStorage::k6 || T.codes == CodeStorage::k2 ||
                T.codes == CodeStorage::k3) {
    const uint32_t field = step % 2 * 2 + half;
    const uint32_t two = (at(g.plane + size_t{step / 2} * 64 + byte) >> (2 * field)) & 3u;
    code |= T.codes == CodeStorage::k6 ? two << 4 : two;
  }
  if constexpr (T.codes == CodeStorage::k5 || T.codes == CodeStorage::k3) {
    const uint32_t field = step % 4 * 2 + half;
    const uint32_t bit = (at(g.bit_plane + size_t{step / 4} * 64 + byte) >> field) & 1u;
    code |= T.codes == CodeStorage::k5 ? bit << 4 : bit << 2;
  }
  return code;
}

template <FormatTraits T>
inline float ExactValue(const PanelView& p, uint32_t j, uint32_t o) {
  const char* codes = p.BlockOf(j) + p.GeometryOfBlock(j).codes;
  const uint32_t i = j % kBlockInputs;
  if constexpr (T.codes == CodeStorage::kF32) {
    return LoadAs<float>(codes + (size_t{i} * kPanelWidth + o) * 4);
  } else if constexpr (T.codes == CodeStorage::kF16) {
    return F16Value(LoadAs<uint16_t>(codes + (size_t{i} * kPanelWidth + o) * 2));
  } else if constexpr (T.codes == CodeStorage::kBf16) {
    return Bf16Value(
        LoadAs<uint16_t>(codes + size_t{i / 2} * 128 + (o / 16) * 64 + (o % 16) * 4 + j % 2 * 2));
  } else if constexpr (T.codes == CodeStorage::kE4m3) {
    return E4m3Value(LoadAs<uint8_t>(codes + size_t{i} * kPanelWidth + o)) * ScaleOf<T>(p, j, o);
  } else {
    const uint32_t code = CodeOf<T>(p, j, o);
    const float scale = ScaleOf<T>(p, j, o);
    float value = 0.0f;
    if constexpr (T.map == CodeMap::kE2m1) {
      value = kE2m1Values[code];
    } else if constexpr (T.map == CodeMap::kIq4Nl) {
      value = static_cast<float>(kIq4NlValues[code]);
    } else if constexpr (T.min == MinType::kZeroPoint) {
      return (static_cast<float>(code) - MinOf<T>(p, j, o)) * scale;
    } else {
      value = static_cast<float>(static_cast<int32_t>(code) - T.offset);
    }
    if constexpr (T.min == MinType::kF16) return scale * value + MinOf<T>(p, j, o);
    if constexpr (HasSuperMin(T)) return scale * value - MinOf<T>(p, j, o);
    return scale * value;
  }
}

}  // namespace
}  // namespace tandem::kernels
