#pragma once

// Softmax attention over a paged cache, shared by Attention and LatentAttention: a tile of queries
// (some heads of some consecutive rows of one sequence, all on the same keys) walks the keys once.
//
// Order of summation: keys are taken in blocks of kSoftmaxBlock positions, aligned to absolute
// positions (block b holds the positions [256 b, 256 b + 256)). Within a block the scores are dot
// products (vector_table.h), their exponentials are summed in F64, the values are added by one fma
// chain in key order; between blocks the running sum and output are rescaled when the maximum
// grows. So a query's result depends on its own position, window and keys only: not on the tile,
// the chunk, the threads or the block table.

#include <algorithm>
#include <cstdint>

#include "gpu_worker/backend.h"
#include "gpu_worker/backend_cpu/op_context.h"

namespace tandem::gpu::cpu {

// One query: sees the keys at positions [first_key, end_key).
struct TileQuery {
  const float* q = nullptr;       // [key_dim]
  const float* q_tail = nullptr;  // [tail_dim]
  float* out = nullptr;           // [value_dim]
  int first_key = 0;
  int end_key = 0;
  bool has_sink = false;
  float sink = 0;  // a logit that joins the denominator only
};

// The same for all tiles of a call, but for the offsets of the KV head.
struct KeyLayout {
  const void* k = nullptr;  // plane of the cache
  const void* v = nullptr;
  int64_t k_width = 0;  // elements of a row of the plane
  int64_t v_width = 0;
  DType dtype = DType::kF32;
  // A key is [key_offset, + key_dim) and [tail_offset, + tail_dim) of its row.
  int64_t key_offset = 0;
  int64_t tail_offset = 0;
  int64_t value_offset = 0;
  int key_dim = 0;
  int tail_dim = 0;
  int value_dim = 0;
  float scale = 0;
};

struct Tile {
  TileQuery queries[kMaxTileQueries];
  int count = 0;
  const int32_t* blocks = nullptr;  // the sequence's row of the block table
  int block_tokens = 0;
};

// Writes `out` of every query. `scores` is [kMaxTileQueries, kSoftmaxBlock] of scratch.
void AttendTile(const OpContext& context, const KeyLayout& layout, const Tile& tile, float* scores);

// Cuts rows [0, rows) into tiles of at most `max_rows` consecutive positions of one sequence, into
// context.row_tiles; returns how many.
int MakeRowTiles(OpContext& context, const RowPlace& place, int rows, int max_rows);

// How the work of `rows` rows by `kv_heads` groups of `group` query heads is cut: an item is at
// most kMaxTileQueries queries, `heads` of one group times up to `rows`; smaller while threads
// idle.
struct TileShape {
  int heads;
  int rows;
};
TileShape ChooseTileShape(int threads, int rows, int kv_heads, int group);

// Calls fn(thread, item) for all items, handed out one by one: their costs differ with the context.
template <typename Fn>
void ForEachItem(OpContext& context, int items, Fn&& fn) {
  if (context.pool.threads() == 1 || items == 1) {
    for (int item = 0; item < items; ++item) fn(0, item);
    return;
  }
  context.next_item.store(0, std::memory_order_relaxed);
  context.pool.Run([&](int thread) {
    while (true) {
      const int item = context.next_item.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      fn(thread, item);
    }
  });
}

// Attention of `rows` rows by `kv_heads` groups of `group` query heads. layout(kv_head) is the
// KeyLayout of a group, query(row, head) the TileQuery of a row's head.
template <typename LayoutFn, typename QueryFn>
void AttendRows(OpContext& context, const RowPlace& place, int rows, int kv_heads, int group,
                LayoutFn&& layout, QueryFn&& query) {
  const TileShape shape = ChooseTileShape(context.pool.threads(), rows, kv_heads, group);
  const int tiles = MakeRowTiles(context, place, rows, shape.rows);
  const int parts = (group + shape.heads - 1) / shape.heads;
  ForEachItem(context, tiles * kv_heads * parts, [&](int thread, int item) {
    const int part = item % parts;
    const int kv_head = item / parts % kv_heads;
    const RowTile tile_rows = context.row_tiles[static_cast<size_t>(item / parts / kv_heads)];
    const int head_begin = kv_head * group + part * shape.heads;
    const int head_end = std::min(head_begin + shape.heads, (kv_head + 1) * group);
    Tile tile;
    for (int row = tile_rows.begin; row < tile_rows.begin + tile_rows.count; ++row) {
      for (int head = head_begin; head < head_end; ++head) {
        tile.queries[tile.count++] = query(row, head);
      }
    }
    tile.blocks =
        place.block_table + int64_t{place.sequence[tile_rows.begin]} * place.blocks_per_sequence;
    tile.block_tokens = place.block_tokens;
    AttendTile(context, layout(kv_head), tile,
               context.scratch[static_cast<size_t>(thread)].scores.data());
  });
}

}  // namespace tandem::gpu::cpu
