#pragma once

// The block in parity mode: F32 rows, exact kernels, three steps with a barrier between. Rows are
// copied; gate, up and activation by (expert, segments); down and the weighted sum by output
// columns, so that no two threads add to the same element. Work within a step is claimed
// dynamically.
//
// Sums: each activation is one chain over the hidden dimension, from the bias where there is one;
// each expert's output one chain over the owned intermediate features, ascending, likewise; these
// are added by fma in the order of the row's picks. So a row's result depends on nothing but the
// row: not on other rows, threads, claims or the instruction set.
//
// Thread safety: Configure and Begin by one thread; Prepare and Run by all together, with barriers
// as in routed_experts.cc. Errors: RESOURCE_EXHAUSTED.

#include "absl/status/status.h"
#include "common/hw/pages.h"
#include "expert_worker/engine/block_parts.h"

namespace tandem::expert {

class ParityBlock {
 public:
  explicit ParityBlock(const BlockContext& context) : context_(context) {}

  absl::Status Configure(const shm::BatchLimits& limits);
  uint64_t workspace_bytes() const { return workspace_.bytes(); }

  // Thread 0, after the batch was grouped.
  void Begin(const shm::ExpertBatch& batch);
  void Prepare(const shm::ExpertBatch& batch, int thread);
  // After a barrier that follows both.
  void Run(const shm::ExpertBatch& batch, int thread);

 private:
  void RunGateUp(const shm::ExpertBatch& batch, int thread);
  void RunGateUpTask(uint32_t layer, const BatchGroups::Group& group, uint32_t segment,
                     float* scratch);
  void RunDown(const shm::ExpertBatch& batch, int thread);
  void RunDownTask(const shm::ExpertBatch& batch, uint32_t task, float* outputs);
  void SumPicks(const shm::ExpertBatch& batch, const float* outputs, uint32_t column,
                uint32_t columns, uint32_t stride) const;

  const BlockContext context_;
  PageBuffer workspace_;
  size_t x_stride_ = 0;
  size_t act_stride_ = 0;
  size_t scratch_floats_ = 0;  // of one thread
  float* x_ = nullptr;         // [max_rows, x_stride_]
  float* act_ = nullptr;       // [max_rows * top_k, act_stride_], by grouped position
  float* scratch_ = nullptr;   // [threads, scratch_floats_]
  // Of the batch in progress.
  uint32_t segments_per_task_ = 1;
  uint32_t panels_per_task_ = 1;
  TaskCounter gate_up_;
  TaskCounter down_;
};

}  // namespace tandem::expert
