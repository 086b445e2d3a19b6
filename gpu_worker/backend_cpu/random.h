#pragma once

// Counter-based random numbers for sampling: a draw is a pure function of (seed, position), so it
// does not depend on other sequences, the batch, or how often the step ran before.
//
// Philox 4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011, section 3.3); the seed is the key, the position the counter.

#include <array>
#include <cstdint>

namespace tandem::gpu {

constexpr std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                             std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1), a multiple of 2^-53.
constexpr double UniformAt(uint64_t seed, int64_t position) {
  const auto counter = static_cast<uint64_t>(position);
  const std::array<uint32_t, 4> bits =
      Philox4x32({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t mantissa = (uint64_t{bits[0]} << 21) ^ (uint64_t{bits[1]} >> 11);
  return static_cast<double>(mantissa & ((uint64_t{1} << 53) - 1)) * 0x1p-53;
}

}  // namespace tandem::gpu
