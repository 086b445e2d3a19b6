#pragma once

// The block in default mode: BF16 rows and each format's fast kernel. Rows are put into the form
// that the layer's gate/up kernel multiplies once for all experts; activations, times the routing
// weight of their row, into the form of its down kernel, segment by segment.
//
// Two plans, chosen a batch:
//   fused  A task is (expert, run of segments): gate and up, activation, then down of the same
//          segments into the thread's own F32 sums [rows, hidden]. One barrier and a reduction by
//          columns follow. With one or two rows of an expert its weights are read as one stream;
//          nothing but the sums leaves the caches of a core. For rows whose sums about fit in the
//          L2 cache, and more on few threads.
//   tiled  Gate and up by (expert, segments) into activations of all picks; a barrier; down by
//          output panels over all experts, straight into the results, whose columns belong to one
//          task. A down sum stays in registers over all segments.
//
// What a result depends on: its row, its picks' experts and weights, the plan (hence the number of
// rows of the batch) and, in the fused plan, which thread took which segments: F32 sums run in
// another order then, which moves a result by a few units in its last place. Values of other rows
// have no influence, not even NaN. Whoever needs bit-equal results takes parity mode.
//
// Thread safety and errors: as ParityBlock.

#include "absl/status/status.h"
#include "common/hw/pages.h"
#include "expert_worker/engine/block_parts.h"
#include "expert_worker/engine/form_rows.h"

namespace tandem::expert {

class FastBlock {
 public:
  // `fused_rows`: batches with results of more rows (BatchGroups::outputs) are tiled; negative:
  // from the cache size.
  FastBlock(const BlockContext& context, int fused_rows)
      : context_(context), wanted_fused_rows_(fused_rows) {}

  absl::Status Configure(const shm::BatchLimits& limits);
  uint64_t workspace_bytes() const { return workspace_.bytes(); }

  void Begin(const shm::ExpertBatch& batch);
  void Prepare(const shm::ExpertBatch& batch, int thread) const;
  // batch.out: [BatchGroups::outputs, hidden].
  void Run(const shm::ExpertBatch& batch, int thread);

 private:
  // Buffers of one thread.
  struct Scratch {
    float* sums;        // [kGateUpRows, 2 * quantum]
    float* activation;  // [quantum rounded up to kStepAlign]
    void* down_rows;    // kGateUpRows rows of a few segments in the down kernel's form
    float* totals;      // [fused_rows_, totals_stride_]
  };
  // Rows [first, first + rows) of the grouped picks, which are of one expert.
  struct RowBlock {
    uint32_t expert;
    uint32_t first;
    uint32_t rows;
  };

  const kernels::FormatKernels& GateUpKernels(uint32_t layer) const;
  const kernels::FormatKernels& DownKernels(uint32_t layer) const;
  FormRows InputRows(uint32_t layer) const;
  FormRows PickRows(uint32_t layer) const;
  FormRows RunRows(uint32_t layer, const Scratch& scratch) const;
  Scratch ScratchOf(int thread) const;

  void RunFused(const shm::ExpertBatch& batch, int thread);
  // `next`: the weights that the thread reads afterwards, or null.
  void RunFusedSegments(uint32_t layer, const BatchGroups::Group& group, SegmentRange run,
                        const void* next, const Scratch& scratch) const;
  void Reduce(const shm::ExpertBatch& batch, int thread) const;
  void RunTiled(const shm::ExpertBatch& batch, int thread);
  void RunTiledGateUp(uint32_t layer, const BatchGroups::Group& group, uint32_t segment,
                      const void* next, const Scratch& scratch, const FormRows& picks) const;
  void RunTiledDown(const shm::ExpertBatch& batch, uint32_t task, const FormRows& picks) const;
  void AddDownBias(uint32_t layer, const BatchGroups::Group& group, uint32_t column,
                   uint32_t columns, float* y, size_t y_stride) const;
  void ActivateInto(uint32_t layer, const RowBlock& block, uint32_t segment, const void* next,
                    const Scratch& scratch, const FormRows& to, size_t first_row,
                    uint32_t column) const;
  // Calls run(group, segments, next weights) for the tasks that this thread claims, a few segments
  // at a time.
  template <typename Fn>
  void ForEachRun(const shm::ExpertBatch& batch, Fn run);

  const BlockContext context_;
  const int wanted_fused_rows_;
  shm::BatchLimits limits_;
  PageBuffer workspace_;
  char* input_ = nullptr;    // rows of the batch in the gate/up kernel's form
  char* picks_ = nullptr;    // activations of all picks in the down kernel's form
  char* scratch_ = nullptr;  // [threads, scratch_bytes_]
  size_t scratch_bytes_ = 0;
  size_t down_rows_bytes_ = 0;
  size_t totals_stride_ = 0;
  uint32_t fused_rows_ = 0;
  size_t l2_bytes_ = 0;
  // Of the batch in progress.
  bool fused_ = false;
  uint32_t segments_per_task_ = 1;
  uint32_t panels_per_task_ = 1;
  TaskCounter segments_;
  TaskCounter down_;
};

}  // namespace tandem::expert
