#pragma once

// The tile configuration of the AMX kernels, and what LDTILECFG reads (Intel SDM volume 1, section
// 18.3). Plain data.

#include <cstddef>
#include <cstdint>

namespace tandem::kernels {

// A tile is 16 rows of 64 bytes.
inline constexpr uint32_t kTileRows = 16;
inline constexpr size_t kTileRowBytes = 64;
inline constexpr size_t kTileBytes = kTileRows * kTileRowBytes;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// All eight tiles whole: one shape serves int8 (64 inputs a tile) and BF16 (32 inputs a tile).
constexpr TileConfig kWholeTiles;

}  // namespace tandem::kernels
