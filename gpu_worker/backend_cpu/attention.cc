#include <algorithm>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/attention_core.h"
#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {
namespace {

TileQuery MakeQuery(const AttentionArgs& args, int row, int head) {
  TileQuery query;
  query.q = args.q.data + row * args.q.ld + int64_t{head} * args.head_dim;
  query.out = args.out.data + row * args.out.ld + int64_t{head} * args.head_dim;
  query.end_key = args.place.positions[row] + 1;
  query.first_key = args.window_tokens > 0 ? std::max(0, query.end_key - args.window_tokens) : 0;
  query.has_sink = args.sinks != nullptr;
  query.sink = query.has_sink ? args.sinks[head] : 0.0f;
  return query;
}

KeyLayout MakeLayout(const AttentionArgs& args) {
  KeyLayout layout;
  layout.k = args.cache.k;
  layout.v = args.cache.v;
  layout.k_width = args.cache.k_width;
  layout.v_width = args.cache.v_width;
  layout.dtype = args.cache.dtype;
  layout.key_dim = args.head_dim;
  layout.value_dim = args.head_dim;
  layout.scale = args.scale;
  return layout;
}

}  // namespace

void Attention(OpContext& context, const AttentionArgs& args) {
  const int rows = RowCount(args.rows);
  if (rows == 0) return;
  TANDEM_DCHECK(rows <= context.limits.max_rows);
  TANDEM_DCHECK(args.heads % args.kv_heads == 0);
  const int group = args.heads / args.kv_heads;
  const TileShape shape = ChooseTileShape(context.pool.threads(), rows, args.kv_heads, group);
  const int tiles = MakeRowTiles(context, args.place, rows, shape.rows);
  const int parts = (group + shape.heads - 1) / shape.heads;
  ForEachItem(context, tiles * args.kv_heads * parts, [&](int thread, int item) {
    const int part = item % parts;
    const int kv_head = item / parts % args.kv_heads;
    const RowTile rows_of_tile =
        context.row_tiles[static_cast<size_t>(item / parts / args.kv_heads)];
    KeyLayout layout = MakeLayout(args);
    layout.key_offset = layout.value_offset = int64_t{kv_head} * args.head_dim;
    Tile tile;
    const int head_begin = kv_head * group + part * shape.heads;
    const int head_end = std::min(head_begin + shape.heads, (kv_head + 1) * group);
    for (int row = rows_of_tile.begin; row < rows_of_tile.begin + rows_of_tile.count; ++row) {
      for (int head = head_begin; head < head_end; ++head) {
        tile.queries[tile.count++] = MakeQuery(args, row, head);
      }
    }
    tile.blocks = args.place.block_table +
                  int64_t{args.place.sequence[rows_of_tile.begin]} * args.place.blocks_per_sequence;
    tile.block_tokens = args.place.block_tokens;
    AttendTile(context, layout, tile, context.scratch[static_cast<size_t>(thread)].scores.data());
  });
}

}  // namespace tandem::gpu::cpu
