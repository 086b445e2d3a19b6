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

class StepPlan {
 public:
  explicit StepPlan(const SequenceLimits& limits);

  // Appends the step's blocks to the table (Rollback undoes it) and fills `buffers`.
  // REQUIRES: the validator accepted `step`, its starts are in the table.
  void Build(const worker::v1::Step& step, SequenceTable& table, StepBuffers& buffers);
  // The step failed: block tables are as before, its sequences are lost.
  void Rollback(SequenceTable& table) const;

  const std::vector<PlannedSequence>& sequences() const { return sequences_; }
  int rows() const { return rows_; }
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
  std::vector<PlannedSequence> sequences_;
  int rows_ = 0;
  int samples_ = 0;
  int prompt_rows_ = 0;
  int biases_ = 0;
  int banned_ = 0;
  bool wants_logprobs_ = false;
};

}  // namespace tandem::gpu
