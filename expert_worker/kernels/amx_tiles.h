#pragma once

// The AMX instructions that kernels use, by tile number. Own wrappers, since the tile intrinsics of
// g++ 12 do not tell the compiler that they read and write memory. Tests put an emulation in the
// place of this header (see intrinsics.h).
//
// Tiles belong to a thread. A thread may use them between LoadTileConfig and ReleaseTiles, once the
// process has the kernel's permission (common/hw/cpu_features.h asks for it). Strides are bytes.
// In an anonymous namespace: no weak symbol may escape from an object of this instruction set.

#include <cstddef>

#include "expert_worker/kernels/amx_tile_config.h"

namespace tandem::kernels {
namespace {

// Sets every tile to zero, too.
inline void LoadTileConfig() { __asm__ volatile("ldtilecfg %0" : : "m"(kWholeTiles) : "memory"); }

inline void ReleaseTiles() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline void ZeroTile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
inline void LoadTile(const void* rows, size_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(rows), "r"(stride), "i"(kTile)
                   : "memory");
}

template <int kTile>
inline void StoreTile(void* rows, size_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(rows), "r"(stride), "i"(kTile)
                   : "memory");
}

// sums[m][n] += signed bytes a[m][4k + i] * unsigned bytes b[k][4n + i], in 32-bit integers.
template <int kSums, int kA, int kB>
inline void DotSignedUnsigned() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// sums[m][n] += BF16 a[m][2k + i] * b[k][2n + i], in F32; subnormals count as zero.
template <int kSums, int kA, int kB>
inline void DotBf16Pairs() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace tandem::kernels
