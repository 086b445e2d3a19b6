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
  const KeyLayout layout = MakeLayout(args);
  AttendRows(
      context, args.place, rows, 1, args.heads, [&](int) { return layout; },
      [&](int row, int head) { return MakeQuery(args, row, head); });
}

}  // namespace tandem::gpu::cpu
