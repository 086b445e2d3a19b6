#pragma once

// Turns a validated Step into the rows of one forward: fills the staging arrays of StepBuffers and
// remembers which rows, samples and prompt log-probabilities belong to which sequence.
//
// Thread safety: none. Build allocates nothing after construction.

#include <cstdint>
#include <vector>

#include "gpu_worker/sequence_table.h"
#include "gpu_worker/step_buffers.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

// One active sequence of the step.
struct PlannedSequence {
  int slot = 0;
  int step_index = 0;  // of Step::sequences
  int first_row = 0;
  int rows = 0;
  int sample_index = -1;  // into the sampled rows; -1: does not sample
  int prompt_begin = 0;   // into the prompt rows
  int prompt_count = 0;
  size_t old_blocks = 0;  // length of the block table before the step
};

struct StepPlanOptions {
  bool defer_prefill = false;  // prompt rows may defer experts too
};

class StepPlan {
 public:
  StepPlan(const SequenceLimits& limits, const StepPlanOptions& options);

  // Appends the step's blocks to the table (Rollback undoes it) and fills `buffers`.
  // REQUIRES: the validator accepted `step`, its starts are in the table.
  void Build(const worker::v1::Step& step, SequenceTable& table, StepBuffers& buffers);
  // Puts the rows from `first_lane_rows` on at `offset` of the step's buffers: they are the second
  // lane. To be called once, after Build. REQUIRES: 0 < first_lane_rows < rows, <= offset.
  void SplitLanes(int first_lane_rows, int offset, StepBuffers& buffers);
  // The step failed: block tables are as before, its sequences are lost.
  void Rollback(SequenceTable& table) const;

  const std::vector<PlannedSequence>& sequences() const { return sequences_; }
  int rows() const { return rows_; }
  // Rows that are a sequence's next token, not prompt.
  int decode_rows() const { return decode_rows_; }
  int lanes() const { return first_lane_rows_ < rows_ ? 2 : 1; }
  // Where row `row` of the step is in its buffers; rows() of them in order, from 0 on.
  int place_of(int row) const { return row < first_lane_rows_ ? row : row + gap_; }
  // Rows of the buffers in use, the gap between the lanes included.
  int extent() const { return lanes() == 1 ? rows_ : rows_ + gap_; }
  int samples() const { return samples_; }
  int prompt_rows() const { return prompt_rows_; }
  // Every row is a sequence's next token and is sampled: the ops depend on the bucket only.
  bool is_decode() const { return rows_ > 0 && rows_ == samples_ && prompt_rows_ == 0; }
  bool wants_logprobs() const { return wants_logprobs_; }

  void Upload(Backend& backend, const StepBuffers& buffers) const;

 private:
  void AddRows(const worker::v1::SequenceStep& step, const Sequence& sequence,
               PlannedSequence& planned, StepBuffers& buffers);
  void AddSample(const worker::v1::SequenceStep& step, const Sequence& sequence,
                 PlannedSequence& planned, StepBuffers& buffers);
  void AddPromptLogprobs(const worker::v1::SequenceStep& step, const Sequence& sequence,
                         PlannedSequence& planned, StepBuffers& buffers);

  const int blocks_per_sequence_;
  const bool defer_prefill_;
  std::vector<PlannedSequence> sequences_;
  int rows_ = 0;
  int decode_rows_ = 0;
  int first_lane_rows_ = 0;
  int gap_ = 0;  // unused rows between the lanes
  int samples_ = 0;
  int prompt_rows_ = 0;
  int biases_ = 0;
  int banned_ = 0;
  bool wants_logprobs_ = false;
};

}  // namespace tandem::gpu
