#pragma once

// In the place of the header of this name, for kernels that are compiled against emulated tiles.

#include <cstddef>

#include "expert_worker/kernels/amx_tile_config.h"
#include "tests/expert_worker/emulation/emulated_tiles.h"

namespace tandem::kernels {
namespace {

inline void LoadTileConfig() { emulation::LoadTileConfig(kWholeTiles); }
inline void ReleaseTiles() { emulation::ReleaseTiles(); }

template <int kTile>
inline void ZeroTile() {
  emulation::ZeroTile(kTile);
}

template <int kTile>
inline void LoadTile(const void* rows, size_t stride) {
  emulation::LoadTile(kTile, rows, stride);
}

template <int kTile>
inline void StoreTile(void* rows, size_t stride) {
  emulation::StoreTile(kTile, rows, stride);
}

template <int kSums, int kA, int kB>
inline void DotSignedUnsigned() {
  emulation::DotSignedUnsigned(kSums, kA, kB);
}

template <int kSums, int kA, int kB>
inline void DotBf16Pairs() {
  emulation::DotBf16Pairs(kSums, kA, kB);
}

}  // namespace
}  // namespace tandem::kernels
