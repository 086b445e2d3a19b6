#pragma once

// Whether all of a row is finite, in one pass that the compiler vectorizes.

#include <bit>
#include <cstdint>

namespace tandem::gpu {

inline bool AllFinite(const float* x, int64_t n) {
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    bad |= (std::bit_cast<uint32_t>(x[i]) & kExponent) == kExponent ? 1u : 0u;
  }
  return bad == 0;
}

}  // namespace tandem::gpu
