#pragma once

// AMX tiles as arrays: what the instructions do (Intel SDM volume 2, and its pseudocode of
// TDPBF16PS), a thread's tiles being thread-local. An instruction that would fault on hardware (no
// configuration, tiles whose shapes do not fit) aborts. Counts the multiplications, so that tests
// can tell how full the tiles were.

#include <cstddef>
#include <cstdint>

#include "expert_worker/kernels/amx_tile_config.h"

namespace tandem::kernels::emulation {

void LoadTileConfig(const TileConfig& config);
void ReleaseTiles();
void ZeroTile(int tile);
void LoadTile(int tile, const void* rows, size_t stride);
void StoreTile(int tile, void* rows, size_t stride);
void DotSignedUnsigned(int sums, int a, int b);
void DotBf16Pairs(int sums, int a, int b);

// Of the calling thread, since its last ResetTileCounts.
struct TileCounts {
  uint64_t int8_products = 0;  // instructions
  uint64_t bf16_products = 0;
};
TileCounts CountedTiles();
void ResetTileCounts();

// Whether the calling thread holds tiles.
bool TilesAreLoaded();

}  // namespace tandem::kernels::emulation
