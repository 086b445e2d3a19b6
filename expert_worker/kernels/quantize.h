#pragma once

// KernelTable::quantize, plain loops that the compiler vectorizes with the flags of the including
// file; the same operations, hence the same bits, everywhere (-ffp-contract=off). In an anonymous
// namespace for the reason given in exact_values.h.

#include <bit>
#include <cstddef>
#include <cstdint>

namespace tandem::kernels {
namespace {

template <uint32_t kGroup>
inline void QuantizeGroup(const float* x, int8_t* q, float* scale, float* scaled_sum,
                          int32_t* sum) {
  constexpr float kRound = 0x1.8p+23f;  // adding it rounds to an integer, ties to even
  uint32_t largest = 0;                 // magnitudes compare as their bits
  for (uint32_t i = 0; i < kGroup; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  const bool finite = largest < 0x7F800000u;
  const float amax = finite ? std::bit_cast<float>(largest) : 0.0f;
  // Below this 127 / amax overflows; such a group is zero beside any other.
  const float inverse = amax > 0x1p-120f ? 127.0f / amax : 0.0f;
  int32_t total = 0;
  for (uint32_t i = 0; i < kGroup; ++i) {
    const float value = finite ? x[i] : 0.0f;
    const float shifted = value * inverse + kRound;
    const int32_t integer =
        static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
    q[i] = static_cast<int8_t>(integer);
    total += integer;
  }
  *scale = finite ? amax / 127.0f : std::bit_cast<float>(0x7FC00000u);
  *scaled_sum = *scale * static_cast<float>(total);
  *sum = total;
}

void Quantize(const float* x, size_t n, uint32_t group, int8_t* q, float* scale, float* scaled_sum,
              int32_t* sum) {
  for (size_t i = 0, g = 0; i < n; i += group, ++g) {
    if (group == 16) {
      QuantizeGroup<16>(x + i, q + i, scale + g, scaled_sum + g, sum + g);
    } else {
      QuantizeGroup<32>(x + i, q + i, scale + g, scaled_sum + g, sum + g);
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
