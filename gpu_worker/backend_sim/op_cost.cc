#include "gpu_worker/backend_sim/op_cost.h"

#include <algorithm>
#include <set>

#include "gpu_worker/backend_cpu/op_context.h"

namespace tandem::gpu {
namespace {

constexpr double kF32 = 4;
constexpr double kBf16 = 2;
constexpr double kCached = 2;  // BF16 keys and values
// Queries of one sequence that share a pass over its keys.
constexpr int kTileQueries = 128;

// `passes` numbers read or written for each of rows x width.
OpCost Elementwise(const Rows& rows, int64_t width, int passes) {
  return {.bytes = kF32 * RowCount(rows) * static_cast<double>(width) * passes};
}

double BytesOfWeight(const SimShape& shape, int64_t n) {
  return n == shape.big.vocab ? shape.bytes.head : shape.bytes.dense;
}

OpCost Product(const SimShape& shape, int rows, int64_t n, int64_t k) {
  const auto weights = static_cast<double>(n * k);
  return {.bytes = weights * BytesOfWeight(shape, n) + kF32 * rows * static_cast<double>(n + k),
          .flops = 2.0 * rows * weights};
}

// Rows of one sequence follow each other, at ascending positions.
OpCost OverKeys(const SimShape& shape, const Rows& rows, const RowPlace& place, int window_tokens) {
  OpCost cost;
  const int count = RowCount(rows);
  int tile_begin = 0;
  for (int row = 0; row < count; ++row) {
    int64_t keys = int64_t{place.positions[row]} + 1 + shape.context_offset;
    if (window_tokens > 0) keys = std::min<int64_t>(keys, window_tokens);
    cost.flops += shape.attention_flops() * static_cast<double>(keys);
    const bool last = row + 1 == count || place.sequence[row + 1] != place.sequence[row];
    if (!last && row + 1 - tile_begin < kTileQueries) continue;
    cost.bytes += kCached * static_cast<double>(keys * shape.cached_width());
    tile_begin = row + 1;
  }
  return cost;
}

}  // namespace

OpCost CostOf(const SimShape& shape, const EmbedArgs& args) {
  return {.bytes = RowCount(args.rows) * shape.big.hidden * (kBf16 + kF32)};
}

OpCost CostOf(const SimShape& shape, const RmsNormArgs& args) {
  return Elementwise(args.rows, shape.Width(args.width) * shape.Groups(args.groups), 2);
}

OpCost CostOf(const SimShape& shape, const LinearArgs& args) {
  return Product(shape, RowCount(args.rows), shape.Width(args.weight->n),
                 shape.Width(args.weight->k));
}

OpCost CostOf(const SimShape& shape, const HeadLinearArgs& args) {
  const LinearWeight& first = *args.weights[0];
  const OpCost one =
      Product(shape, RowCount(args.rows), shape.Width(first.n), shape.Width(first.k));
  const auto heads = static_cast<double>(shape.Groups(args.heads));
  return {.bytes = heads * one.bytes, .flops = heads * one.flops};
}

OpCost CostOf(const SimShape& shape, const RopeAnglesArgs& args) {
  return Elementwise(args.rows, shape.big.rope.rotary_dims, 1);
}

OpCost CostOf(const SimShape& shape, const RopeArgs& args) {
  return Elementwise(args.rows, shape.Groups(args.heads) * shape.big.rope.rotary_dims, 2);
}

OpCost CostOf(const SimShape& shape, const CacheWriteArgs& args) {
  return {.bytes =
              RowCount(args.rows) * static_cast<double>(shape.cached_width()) * (kF32 + kCached)};
}

OpCost CostOf(const SimShape& shape, const AttentionArgs& args) {
  return OverKeys(shape, args.rows, args.place, args.window_tokens);
}

OpCost CostOf(const SimShape& shape, const LatentAttentionArgs& args) {
  return OverKeys(shape, args.rows, args.place, 0);
}

OpCost CostOf(const SimShape& shape, const SiluMulArgs& args) {
  return Elementwise(args.rows, shape.Width(args.width), 3);
}

OpCost CostOf(const SimShape& shape, const AddArgs& args) {
  return Elementwise(args.rows, shape.Width(args.width), 3);
}

OpCost CostOf(const SimShape&, const RouterArgs& args) {
  return Elementwise(args.rows, args.experts, 1);
}

OpCost CostOf(const SimShape&, const SplitPicksArgs& args) {
  // Ids and weights in; ids of workers and of slots, and the deferred bytes out.
  return {.bytes = RowCount(args.rows) * args.top_k * (2 + kF32 + 2 + 2 + 1)};
}

OpCost CostOf(const SimShape& shape, const ResidentExpertsArgs& args) {
  std::set<uint16_t> experts;
  double picks = 0;
  const int64_t count = static_cast<int64_t>(RowCount(args.rows)) * shape.big.moe.top_k;
  for (int64_t i = 0; i < count; ++i) {
    if (args.slots[i] == kNoExpert) continue;
    experts.insert(args.slots[i]);
    ++picks;
  }
  OpCost cost = Elementwise(args.rows, shape.big.hidden, 3);
  cost.bytes += static_cast<double>(experts.size()) * shape.expert_bytes();
  cost.flops += picks * shape.expert_flops();
  return cost;
}

OpCost CostOf(const SimShape& shape, const GatherRowsArgs& args) {
  return Elementwise(args.rows, shape.Width(args.width), 2);
}

OpCost CostOf(const SimShape& shape, const SampleArgs& args) {
  return Elementwise(args.rows, shape.Width(args.vocab), 2);
}

OpCost CostOf(const SimShape& shape, const LogprobsArgs& args) {
  return Elementwise(args.rows, shape.Width(args.vocab), 2);
}

OpCost CostOf(const SimShape& shape, const BlockCopyArgs& args) {
  return {.bytes = 2 * kCached * args.count * args.block_tokens *
                   static_cast<double>(shape.cached_width())};
}

}  // namespace tandem::gpu
