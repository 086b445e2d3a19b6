#include "gpu_worker/backend_cpu/op_context.h"

#include <algorithm>

#include "gpu_worker/backend_cpu/top_tokens.h"

namespace tandem::gpu {

OpContext::OpContext(const expert::Pool::Options& pool_options,
                     const kernels::KernelTable& kernel_table, const Limits& op_limits)
    : pool(pool_options),
      kernels(kernel_table),
      vectors(VectorTableFor(kernel_table.isa)),
      limits(op_limits),
      scratch(static_cast<size_t>(pool_options.threads)),
      row_tiles(static_cast<size_t>(op_limits.max_rows)) {
  const auto vocab = static_cast<size_t>(limits.max_vocab);
  const size_t blocks = (vocab + kBlockTokens - 1) / kBlockTokens;
  // By its own thread, so that the pages lie on that thread's node.
  pool.Run([&](int thread) {
    ThreadScratch& s = scratch[static_cast<size_t>(thread)];
    s.scores.resize(size_t{kMaxTileQueries} * kSoftmaxBlock);
    s.weights.resize(std::max(vocab, 2 * static_cast<size_t>(limits.max_experts)));
    s.block_max.resize(blocks);
    s.block_order.resize(blocks);
    s.ids.resize(vocab);
  });
}

}  // namespace tandem::gpu
