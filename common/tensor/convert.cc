#include "common/tensor/convert.h"

#include <cstring>

#include "common/base/check.h"

namespace tandem {
namespace {

template <typename T, typename Decode>
void Convert(const void* src, int64_t count, float* dst, Decode decode) {
  const auto* bytes = static_cast<const unsigned char*>(src);
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
    dst[i] = decode(value);
  }
}

// Scans in blocks without an early exit inside, so that the compiler vectorizes the test.
template <typename NonFinite>
std::optional<int64_t> FindFirst(int64_t count, NonFinite non_finite) {
  constexpr int64_t kBlock = 256;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    unsigned bad = 0;
    for (int64_t i = begin; i < end; ++i) bad |= non_finite(i) ? 1u : 0u;
    if (bad == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (non_finite(i)) return i;
    }
  }
  return std::nullopt;
}

// 16-bit floats whose exponent, `mask`, is all ones are NaN or infinite.
template <uint16_t mask>
std::optional<int64_t> FindFullExponent(const void* values, int64_t count) {
  const auto* bytes = static_cast<const unsigned char*>(values);
  return FindFirst(count, [bytes](int64_t i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + i * sizeof(bits), sizeof(bits));
    return (bits & mask) == mask;
  });
}

}  // namespace

bool IsFloatConvertible(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3:
    case DType::kF8E8M0:
      return true;
    default:
      return false;
  }
}

void ConvertToF32(DType dtype, const void* src, int64_t count, float* dst) {
  switch (dtype) {
    case DType::kF32:
      if (count > 0) std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBF16:
      return ConvertBf16ToF32(src, count, dst);
    case DType::kF16:
      return Convert<uint16_t>(src, count, dst, F16ToF32);
    case DType::kF8E4M3:
      return Convert<uint8_t>(src, count, dst, [](uint8_t code) { return kE4m3ToF32[code]; });
    case DType::kF8E8M0:
      return Convert<uint8_t>(src, count, dst, E8m0ToF32);
    default:
      TANDEM_CHECK(false && "ConvertToF32: see IsFloatConvertible");
  }
}

void ConvertBf16ToF32(const void* src, int64_t count, float* dst) {
  Convert<uint16_t>(src, count, dst, Bf16ToF32);
}

void ConvertF32ToBf16(const float* src, int64_t count, void* dst) {
  auto* bytes = static_cast<unsigned char*>(dst);
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t value = F32ToBf16(src[i]);
    std::memcpy(bytes + i * sizeof(value), &value, sizeof(value));
  }
}

std::optional<int64_t> FindNonFinite(const float* values, int64_t count) {
  return FindFirst(count, [values](int64_t i) {
    return (std::bit_cast<uint32_t>(values[i]) & 0x7f800000u) == 0x7f800000u;
  });
}

std::optional<int64_t> FindNonFiniteBf16(const void* values, int64_t count) {
  return FindFullExponent<0x7f80>(values, count);
}

std::optional<int64_t> FindNonFiniteF16(const void* values, int64_t count) {
  return FindFullExponent<0x7c00>(values, count);
}

}  // namespace tandem
