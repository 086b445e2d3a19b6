#include "tests/expert_worker/emulation/emulated_tiles.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "common/base/check.h"

namespace tandem::kernels::emulation {
namespace {

constexpr int kTiles = 8;
constexpr uint32_t kMostRows = 16;
constexpr uint32_t kMostBytes = 64;

struct Tile {
  uint32_t rows;
  uint32_t row_bytes;
  alignas(64) unsigned char bytes[kMostRows][kMostBytes];

  template <typename T>
  T At(uint32_t row, uint32_t index) const {
    T value;
    std::memcpy(&value, &bytes[row][index * sizeof(T)], sizeof(T));
    return value;
  }
  template <typename T>
  void Set(uint32_t row, uint32_t index, T value) {
    std::memcpy(&bytes[row][index * sizeof(T)], &value, sizeof(T));
  }
};

struct State {
  bool loaded = false;
  Tile tiles[kTiles];
  TileCounts counts;
};

thread_local State state;

Tile& Loaded(int tile) {
  TANDEM_CHECK(state.loaded);
  TANDEM_CHECK(tile >= 0 && tile < kTiles);
  TANDEM_CHECK(state.tiles[tile].rows != 0);
  return state.tiles[tile];
}

// A dot product of four bytes or two BF16 needs sums [m, n], a [m, k] and b [k, n] in dwords.
void CheckShapes(const Tile& sums, const Tile& a, const Tile& b) {
  TANDEM_CHECK(&sums != &a && &sums != &b && &a != &b);
  TANDEM_CHECK(a.rows == sums.rows);
  TANDEM_CHECK(b.rows == a.row_bytes / 4);
  TANDEM_CHECK(b.row_bytes == sums.row_bytes);
}

float Bf16(uint16_t bits) {
  const bool subnormal = (bits & 0x7F80) == 0;
  return std::bit_cast<float>(uint32_t{subnormal ? bits & 0x8000u : bits} << 16);
}

float Flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? 0.0f : value; }

}  // namespace

void LoadTileConfig(const TileConfig& config) {
  TANDEM_CHECK(config.palette == 1);
  state.loaded = true;
  for (int t = 0; t < kTiles; ++t) {
    TANDEM_CHECK(config.rows[t] <= kMostRows && config.row_bytes[t] <= kMostBytes);
    TANDEM_CHECK(config.row_bytes[t] % 4 == 0);
    state.tiles[t] = {config.rows[t], config.row_bytes[t], {}};
  }
}

void ReleaseTiles() { state.loaded = false; }

void ZeroTile(int tile) { std::memset(Loaded(tile).bytes, 0, sizeof(Tile::bytes)); }

void LoadTile(int tile, const void* rows, size_t stride) {
  Tile& t = Loaded(tile);
  for (uint32_t r = 0; r < t.rows; ++r) {
    std::memcpy(t.bytes[r], static_cast<const char*>(rows) + r * stride, t.row_bytes);
  }
}

void StoreTile(int tile, void* rows, size_t stride) {
  const Tile& t = Loaded(tile);
  for (uint32_t r = 0; r < t.rows; ++r) {
    std::memcpy(static_cast<char*>(rows) + r * stride, t.bytes[r], t.row_bytes);
  }
}

void DotSignedUnsigned(int sums, int a, int b) {
  Tile& c = Loaded(sums);
  const Tile &left = Loaded(a), &right = Loaded(b);
  CheckShapes(c, left, right);
  ++state.counts.int8_products;
  for (uint32_t m = 0; m < c.rows; ++m) {
    int32_t row[kMostBytes / 4] = {};
    for (uint32_t k = 0; k < right.rows; ++k) {
      for (uint32_t n = 0; n < c.row_bytes / 4; ++n) {
        for (uint32_t i = 0; i < 4; ++i) {
          row[n] += left.At<int8_t>(m, 4 * k + i) * right.At<uint8_t>(k, 4 * n + i);
        }
      }
    }
    for (uint32_t n = 0; n < c.row_bytes / 4; ++n) c.Set(m, n, c.At<int32_t>(m, n) + row[n]);
  }
}

void DotBf16Pairs(int sums, int a, int b) {
  Tile& c = Loaded(sums);
  const Tile &left = Loaded(a), &right = Loaded(b);
  CheckShapes(c, left, right);
  ++state.counts.bf16_products;
  for (uint32_t m = 0; m < c.rows; ++m) {
    float even[kMostBytes / 4] = {}, odd[kMostBytes / 4] = {};
    for (uint32_t k = 0; k < right.rows; ++k) {
      const float x0 = Bf16(left.At<uint16_t>(m, 2 * k));
      const float x1 = Bf16(left.At<uint16_t>(m, 2 * k + 1));
      for (uint32_t n = 0; n < c.row_bytes / 4; ++n) {
        even[n] += x0 * Bf16(right.At<uint16_t>(k, 2 * n));
        odd[n] += x1 * Bf16(right.At<uint16_t>(k, 2 * n + 1));
      }
    }
    for (uint32_t n = 0; n < c.row_bytes / 4; ++n) {
      c.Set(m, n, Flushed(c.At<float>(m, n) + Flushed(even[n] + odd[n])));
    }
  }
}

TileCounts CountedTiles() { return state.counts; }
void ResetTileCounts() { state.counts = {}; }
bool TilesAreLoaded() { return state.loaded; }

}  // namespace tandem::kernels::emulation
