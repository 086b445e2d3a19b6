#pragma once

// Conversions between F32 and the narrow float types, one value or many at a time. To F32 they are
// exact; from F32 they round to nearest, ties to even, and overflow to infinity.
//
// Sources and destinations of the bulk forms may be unaligned (tensors of old safetensors files
// are) and must not overlap. Thread-safe; no allocation.
//   BF16: s eeeeeeee mmmmmmm, the upper half of F32.
//   E4M3 (e4m3fn): s eeee mmm, bias 7, no infinities, 0x7F and 0xFF are NaN, largest 448.
//   E8M0: 2^(e - 127), 255 is NaN.

#include <array>
#include <bit>
#include <cstdint>
#include <optional>

#include "common/tensor/dtype.h"

namespace tandem {

constexpr float Bf16ToF32(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

constexpr uint16_t F32ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float F16ToF32(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

constexpr uint16_t F32ToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {
    // Subnormal result: adding 0.5 aligns the mantissa so that F32 addition does the rounding.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

constexpr float E8m0ToF32(uint8_t bits) {
  if (bits == 0xff) return std::bit_cast<float>(0x7fc00000u);
  if (bits == 0) return std::bit_cast<float>(0x00400000u);  // 2^-127, subnormal in F32
  return std::bit_cast<float>(uint32_t{bits} << 23);
}

constexpr bool IsNanE4m3(uint8_t bits) { return (bits & 0x7fu) == 0x7fu; }

constexpr float DecodeE4m3(uint8_t bits) {
  const uint32_t sign = uint32_t{bits & 0x80u} << 24;
  const uint32_t exponent = (bits >> 3) & 0xfu;
  const uint32_t mantissa = bits & 7u;
  if (IsNanE4m3(bits)) return std::bit_cast<float>(sign | 0x7fc00000u);
  const float magnitude = exponent == 0
                              ? static_cast<float>(mantissa) * 0x1p-9f
                              : std::bit_cast<float>(((exponent + 120) << 23) | (mantissa << 20));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

inline constexpr std::array<float, 256> kE4m3ToF32 = [] {
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) table[i] = DecodeE4m3(static_cast<uint8_t>(i));
  return table;
}();

// True for the types that ConvertToF32 reads: F32, F16, BF16, F8_E4M3, F8_E8M0.
bool IsFloatConvertible(DType dtype);

// `count` elements. REQUIRES: IsFloatConvertible(dtype).
void ConvertToF32(DType dtype, const void* src, int64_t count, float* dst);
void ConvertBf16ToF32(const void* src, int64_t count, float* dst);
void ConvertF32ToBf16(const float* src, int64_t count, void* dst);

// Index of the first NaN or infinity.
std::optional<int64_t> FindNonFinite(const float* values, int64_t count);
// The same over BF16 and F16 bits, possibly unaligned.
std::optional<int64_t> FindNonFiniteBf16(const void* values, int64_t count);
std::optional<int64_t> FindNonFiniteF16(const void* values, int64_t count);

}  // namespace tandem
