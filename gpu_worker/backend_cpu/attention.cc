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

KeyLayout MakeLayout(const AttentionArgs& args, int kv_head) {
  KeyLayout layout;
  layout.k = args.cache.k;
  layout.v = args.cache.v;
  layout.k_width = args.cache.k_width;
  layout.v_width = args.cache.v_width;
  layout.dtype = args.cache.dtype;
  layout.key_offset = layout.value_offset = int64_t{kv_head} * args.head_dim;
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
  AttendRows(
      context, args.place, rows, args.kv_heads, args.heads / args.kv_heads,
      [&](int kv_head) { return MakeLayout(args, kv_head); },
      [&](int row, int head) { return MakeQuery(args, row, head); });
}

}  // namespace tandem::gpu::cpu
