#include <algorithm>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/attention_core.h"
#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {
namespace {

TileQuery MakeQuery(const LatentAttentionArgs& args, int row, int head) {
  TileQuery query;
  query.q = args.q_latent.data + row * args.q_latent.ld + int64_t{head} * args.latent_dim;
  query.q_tail = args.q_rope.data + row * args.q_rope.ld + head * args.q_rope_head_stride;
  query.out = args.out.data + row * args.out.ld + int64_t{head} * args.latent_dim;
  query.end_key = args.place.positions[row] + 1;
  return query;
}

// One row of the cache is key (latent and rope part) and value (latent part) of every head.
KeyLayout MakeLayout(const LatentAttentionArgs& args) {
  KeyLayout layout;
  layout.k = layout.v = args.cache.k;
  layout.k_width = layout.v_width = args.cache.k_width;
  layout.dtype = args.cache.dtype;
  layout.key_dim = layout.value_dim = args.latent_dim;
  layout.tail_offset = args.latent_dim;
  layout.tail_dim = args.rope_dim;
  layout.scale = args.scale;
  return layout;
}

}  // namespace

void LatentAttention(OpContext& context, const LatentAttentionArgs& args) {
  const int rows = RowCount(args.rows);
  if (rows == 0) return;
  TANDEM_DCHECK(rows <= context.limits.max_rows);
  const TileShape shape = ChooseTileShape(context.pool.threads(), rows, 1, args.heads);
  const int tiles = MakeRowTiles(context, args.place, rows, shape.rows);
  const int parts = (args.heads + shape.heads - 1) / shape.heads;
  const KeyLayout layout = MakeLayout(args);
  ForEachItem(context, tiles * parts, [&](int thread, int item) {
    const RowTile rows_of_tile = context.row_tiles[static_cast<size_t>(item / parts)];
    Tile tile;
    const int head_begin = item % parts * shape.heads;
    const int head_end = std::min(head_begin + shape.heads, args.heads);
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
