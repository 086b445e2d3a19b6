#pragma once

// The routed-expert block: for each row of a batch the sum over its picks of
//   weight * down( silu(gate x) * (up x) )
// over the segments of the intermediate dimension that this worker's store holds.
//
// Executed SPMD by the threads of the caller's pool in three steps with a barrier between: rows are
// widened to F32 and grouped by expert; gate, up and activation by (expert, segments); down and the
// weighted sum by output columns, so that no two threads add to the same element. Work within a
// step is claimed dynamically.
//
// Sums: each activation is one chain over the hidden dimension; each expert's output is one chain
// over the owned intermediate features, ascending; these are added by fma in the order of the row's
// picks. So a row's result depends on nothing but the row: not on other rows, threads, claims or
// the instruction set.
//
// Deferred picks: computed at once, like all others. That is what deferral approximates, and a
// worker that answers early leaves no carry; the sender's accounting of deferred mass is its own.
//
// Thread safety: Run as BatchHandler says; Configure and Run exclude each other. Ownership: store
// and table must outlive it. Errors: Configure only; a layer without routed experts gives zeros.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/hw/pages.h"
#include "common/shm/expert_batch.h"
#include "common/shm/team_barrier.h"
#include "expert_worker/engine/weight_store.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::expert {

class RoutedExperts final : public shm::BatchHandler {
 public:
  struct Options {
    int threads = 1;  // that will call Run together
    // Waiting at the two barriers inside Run: the others are at work then, so spinning is short;
    // the yields let another process that shares the cores finish its part.
    shm::SpinPolicy spin{50000, true};
  };

  RoutedExperts(const WeightStore* store, const kernels::KernelTable* table,
                const Options& options);

  // Allocates the workspace: about rows * (hidden + top_k * width) floats.
  // Errors: FAILED_PRECONDITION when the limits are not those of the store; RESOURCE_EXHAUSTED.
  absl::Status Configure(const shm::BatchLimits& limits) override;
  void Run(const shm::ExpertBatch& batch, int thread, int threads) override;

  // Any thread.
  uint64_t workspace_bytes() const { return workspace_bytes_.load(std::memory_order_relaxed); }

 private:
  // Rows of one expert: positions [begin, begin + count) of the grouped picks.
  struct Group {
    uint32_t expert;
    uint32_t begin;
    uint32_t count;
  };

  void PlanBatch(const shm::ExpertBatch& batch);
  void WidenRows(const shm::ExpertBatch& batch, int thread);
  void RunGateUp(const shm::ExpertBatch& batch, int thread);
  void RunGateUpTask(uint32_t layer, const Group& group, uint32_t segment, float* scratch);
  void RunDown(const shm::ExpertBatch& batch, int thread);
  void SumPicks(const shm::ExpertBatch& batch, const float* outputs, uint32_t column,
                uint32_t columns, uint32_t stride) const;
  void ZeroRows(const shm::ExpertBatch& batch, int thread) const;
  float* Scratch(int thread) const;

  const WeightStore* const store_;
  const kernels::KernelTable* const table_;
  const kernels::FormatKernels& kernels_;
  const int threads_;
  const shm::SpinPolicy spin_;
  shm::TeamBarrier barrier_;

  shm::BatchLimits limits_;
  PageBuffer workspace_;
  std::atomic<uint64_t> workspace_bytes_{0};
  size_t x_stride_ = 0;
  size_t act_stride_ = 0;
  size_t scratch_floats_ = 0;  // of one thread
  float* x_ = nullptr;         // [max_rows, x_stride_]
  float* act_ = nullptr;       // [max_rows * top_k, act_stride_], by grouped position
  float* scratch_ = nullptr;   // [threads, scratch_floats_]

  // Of the batch in progress; written by thread 0 before the first barrier.
  std::vector<uint32_t> counts_;    // [experts], and one more for the running sum
  std::vector<uint32_t> rows_;      // [picks] the row of a grouped position
  std::vector<uint32_t> position_;  // [rows * top_k] grouped position of a pick, or kSkipped
  std::vector<Group> groups_;       // experts in use, ascending; capacity fixed in Configure
  uint32_t group_count_ = 0;
  uint32_t picks_ = 0;
  uint32_t segments_per_task_ = 1;
  uint32_t panels_per_task_ = 1;
  alignas(128) std::atomic<uint32_t> next_gate_up_{0};
  alignas(128) std::atomic<uint32_t> next_down_{0};
};

}  // namespace tandem::expert
