#pragma once

// KernelTable::quantize, plain loops that the compiler vectorizes with the flags of the including
// file; the same operations, hence the same bits, everywhere (-ffp-contract=off). In an anonymous
// namespace for the reason given in exact_values.h.

#include <bit>
#include <cstddef>
#include <cstdint>

#include "expert_worker/kernels/formats.h"

namespace tandem::kernels {
namespace {

// Of inputs that share a scale. Where one is NaN or infinite all are zero, and the scale is NaN.
struct SharedScale {
  bool finite;
  float scale;
  float inverse;
};

inline SharedScale ScaleOf(const float* x, size_t n) {
  uint32_t largest = 0;  // magnitudes compare as their bits
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  const bool finite = largest < 0x7F800000u;
  const float amax = finite ? std::bit_cast<float>(largest) : 0.0f;
  return {finite, finite ? amax / 127.0f : std::bit_cast<float>(0x7FC00000u),
          // Below this 127 / amax overflows; such inputs are zero beside any other.
          amax > 0x1p-120f ? 127.0f / amax : 0.0f};
}

// The sum of the group's q.
template <uint32_t kGroup>
inline int32_t QuantizeGroup(const float* x, const SharedScale& scale, int8_t* q) {
  constexpr float kRound = 0x1.8p+23f;  // adding it rounds to an integer, ties to even
  int32_t total = 0;
  for (uint32_t i = 0; i < kGroup; ++i) {
    const float value = scale.finite ? x[i] : 0.0f;
    const float shifted = value * scale.inverse + kRound;
    const int32_t integer =
        static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
    q[i] = static_cast<int8_t>(integer);
    total += integer;
  }
  return total;
}

void Quantize(const float* x, size_t n, WeightFormat format, int8_t* q, float* scale,
              float* scaled_sum, int32_t* sum) {
  const FormatTraits& t = TraitsOf(format);
  const size_t most = ActivationGroup(t);
  for (size_t i = 0, g = 0; i < n; i += most) {
    const size_t end = n - i < most ? n : i + most;
    const SharedScale shared = ScaleOf(x + i, end - i);
    for (size_t j = i; j < end; j += t.dot_group, ++g) {
      sum[g] = t.dot_group == 16 ? QuantizeGroup<16>(x + j, shared, q + j)
                                 : QuantizeGroup<32>(x + j, shared, q + j);
      scale[g] = shared.scale;
      scaled_sum[g] = shared.scale * static_cast<float>(sum[g]);
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
