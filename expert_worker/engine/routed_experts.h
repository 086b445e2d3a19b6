#pragma once

// The routed-expert block: for each row of a batch the sum over its picks of
//   weight * (down activation(gate x + b, up x + c) + d)
// over the segments of the intermediate dimension that this worker's store holds; activation is
// silu(g) * u or its clamped form, biases are zero in most models.
//
// Executed SPMD by the threads of the caller's pool. F32 rows are parity mode (parity_block.h:
// fixed sums, bit-equal whatever else runs); BF16 rows are default mode (fast_block.h: the formats'
// fast kernels, plans for few and for many rows).
//
// Deferred picks (Expert Deferral): Run answers with the sum of the other picks plus the carry,
// what RunDeferred has left of the same lane's previous layer. A carry is dropped when the step or
// the epoch changes. Without deferred picks nothing of this is executed: same bits. In default mode
// Run takes deferred picks of experts whose weights it reads anyway along (batch_groups.h); they go
// into the carry.
//
// Thread safety: Run as BatchHandler says; Configure and Run exclude each other. Ownership: store
// and table must outlive it. Errors: Configure only; a layer without routed experts gives zeros.

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/hw/pages.h"
#include "common/shm/expert_batch.h"
#include "common/shm/team_barrier.h"
#include "expert_worker/engine/batch_groups.h"
#include "expert_worker/engine/fast_block.h"
#include "expert_worker/engine/parity_block.h"
#include "expert_worker/engine/weight_store.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::expert {

class RoutedExperts final : public shm::BatchHandler {
 public:
  struct Options {
    int threads = 1;  // that will call Run together
    // Waiting at the barriers inside Run: the others are at work then, so spinning is short; the
    // yields let another process that shares the cores finish its part.
    shm::SpinPolicy spin{50000, true};
    // Default mode: batches with results of more rows take the plan for many; negative: from the
    // size of the L2 cache.
    int fused_rows = -1;
  };

  RoutedExperts(const WeightStore* store, const kernels::KernelTable* table,
                const Options& options);

  // Chooses the mode by limits.row_type and allocates the workspace: about rows * (hidden + top_k *
  // width) elements, and sums of a few rows a thread. The carries, [lanes, 4 * rows, hidden], take
  // memory only once picks are deferred.
  // Errors: FAILED_PRECONDITION when the limits are not those of the store; RESOURCE_EXHAUSTED.
  absl::Status Configure(const shm::BatchLimits& limits) override;
  // REQUIRES: batch.row_type is that of the limits.
  void Run(const shm::ExpertBatch& batch, int thread, int threads) override;
  // REQUIRES: Run of the same batch came before.
  void RunDeferred(const shm::ExpertBatch& batch, int thread, int threads) override;

  // Any thread.
  uint64_t workspace_bytes() const { return workspace_bytes_.load(std::memory_order_relaxed); }

 private:
  // What a lane's deferred picks have summed to, for its next layer. Two buffers take turns, since
  // the next carry begins before the last one is answered.
  struct Carry {
    bool full = false;
    uint64_t step = 0;
    uint64_t epoch = 0;
    uint32_t layer = 0;
    uint32_t rows = 0;
    // [2 * max_rows, hidden]: the rows of a batch's own sums, where they are not written into its
    // results at once, then those of the carry.
    float* sums = nullptr;
    float* next_sums = nullptr;

    float* carried(const shm::ExpertBatch& batch) const {
      return sums + size_t{batch.rows} * batch.hidden;
    }
  };

  absl::Status MakeCarries(const shm::BatchLimits& limits);
  template <typename Block>
  void RunBlock(Block& block, const shm::ExpertBatch& batch, int thread);
  template <typename Block>
  void RunDeferredBlock(Block& block, const shm::ExpertBatch& batch, int thread);
  void GroupPicks(const shm::ExpertBatch& batch, BatchGroups::Part part);
  bool IsDue(const Carry& carry, const shm::ExpertBatch& batch) const;
  // This thread's share of adding `from` [rows, hidden] to `to`, and of copying it there.
  void AddShare(const shm::ExpertBatch& batch, const float* from, float* to, int thread) const;
  void CopyShare(const shm::ExpertBatch& batch, const float* from, float* to, int thread) const;

  const WeightStore* const store_;
  shm::TeamBarrier barrier_;
  const BlockContext context_;
  shm::BatchLimits limits_;
  std::atomic<uint64_t> workspace_bytes_{0};
  // Of the batch in progress; written by thread 0 before the first barrier.
  BatchGroups groups_;
  const float* due_ = nullptr;  // the carry that belongs into its results
  bool shares_ = false;         // Run computes deferred picks too
  std::vector<Carry> carries_;  // one a lane
  PageBuffer carry_memory_;
  ParityBlock parity_;
  FastBlock fast_;
};

}  // namespace tandem::expert
