#pragma once

// What every op of the CPU backend works with: the thread pool, the kernel tables of one
// instruction set, and scratch memory of each thread. Ops are free functions over it (ops.h). Owned
// by CpuBackend; used by its one enqueuing thread. Nothing here allocates after construction.

#include <atomic>
#include <cstdint>
#include <vector>

#include "expert_worker/engine/pool.h"
#include "expert_worker/kernels/kernel_table.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/backend_cpu/vector_table.h"

namespace tandem::gpu {

// Consecutive rows of a step that are consecutive positions of one sequence.
struct RowTile {
  int begin;
  int count;
};

// Queries that share keys are processed together; scores of one softmax block of each.
inline constexpr int kMaxTileQueries = 32;
inline constexpr int kSoftmaxBlock = 256;

struct ThreadScratch {
  std::vector<float> scores;       // [kMaxTileQueries, kSoftmaxBlock]
  std::vector<float> weights;      // [max_vocab]: sampling weights; a router's scores
  std::vector<float> block_max;    // [CeilDiv(max_vocab, kBlockTokens)]
  std::vector<float> block_order;  // as block_max
  std::vector<int32_t> ids;        // [max_vocab]
};

class OpContext {
 public:
  struct Limits {
    int max_rows = 0;
    int64_t max_vocab = 0;
    int max_experts = 0;
  };
  OpContext(const expert::Pool::Options& pool_options, const kernels::KernelTable& kernel_table,
            const Limits& limits);

  expert::Pool pool;
  const kernels::KernelTable& kernels;
  const VectorTable& vectors;
  const Limits limits;
  std::vector<ThreadScratch> scratch;  // one a thread
  std::vector<RowTile> row_tiles;      // [max_rows]
  std::atomic<int> next_item{0};       // of ops that hand out unequal work dynamically

  // Calls fn(thread, begin, end) with a static partition of [0, items). `work` is the cost of an
  // item in elementary operations (one F32 load, multiply-add and store).
  template <typename Fn>
  void ForEach(int64_t items, int64_t work, Fn&& fn) {
    if (items <= 0) return;
    const int threads = pool.threads();
    if (threads == 1 || items == 1 || items * work < kSerialWork) {
      fn(0, int64_t{0}, items);
      return;
    }
    pool.Run([&](int thread) {
      const int64_t begin = items * thread / threads;
      const int64_t end = items * (thread + 1) / threads;
      if (begin < end) fn(thread, begin, end);
    });
  }

 private:
  // A fork and join takes 0.5 us. A core does about 8 elementary operations a nanosecond from its
  // caches: 4096 take 0.5 us alone, so at twice that two threads begin to win.
  static constexpr int64_t kSerialWork = 8192;
};

// Rows that exist: min(*count, bound), or bound where there is no count.
inline int RowCount(const Rows& rows) {
  if (rows.count == nullptr) return rows.bound;
  const int32_t count = *rows.count;
  if (count < 0) return 0;
  return count < rows.bound ? count : rows.bound;
}

}  // namespace tandem::gpu
