#include "gpu_worker/step_plan.h"

#include <algorithm>

#include "common/base/check.h"

namespace tandem::gpu {

using worker::v1::SequenceStep;
using worker::v1::Step;

StepPlan::StepPlan(const SequenceLimits& limits, const StepPlanOptions& options)
    : blocks_per_sequence_(limits.blocks_per_sequence()), defer_prefill_(options.defer_prefill) {
  sequences_.reserve(static_cast<size_t>(limits.max_sequences));
}

void StepPlan::Build(const Step& step, SequenceTable& table, StepBuffers& buffers) {
  sequences_.clear();
  rows_ = decode_rows_ = samples_ = prompt_rows_ = biases_ = banned_ = gap_ = 0;
  wants_logprobs_ = false;
  for (int i = 0; i < step.sequences_size(); ++i) {
    const SequenceStep& sequence = step.sequences(i);
    const int slot = table.Find(sequence.sequence_id());
    TANDEM_CHECK(slot >= 0);
    if (table.at(slot).state == SequenceState::kInactive) continue;
    PlannedSequence planned{.slot = slot,
                            .step_index = i,
                            .first_row = rows_,
                            .old_blocks = table.at(slot).blocks.size()};
    table.AppendBlocks(slot, sequence);
    AddRows(sequence, table.at(slot), planned, buffers);
    if (sequence.sample()) AddSample(sequence, table.at(slot), planned, buffers);
    AddPromptLogprobs(sequence, table.at(slot), planned, buffers);
    sequences_.push_back(planned);
  }
  first_lane_rows_ = rows_;
  buffers.row_count[0] = rows_;
  buffers.row_count[1] = 0;
  buffers.sample_count[0] = samples_;
}

void StepPlan::SplitLanes(int first_lane_rows, int offset, StepBuffers& buffers) {
  TANDEM_DCHECK(first_lane_rows > 0 && first_lane_rows < rows_ && first_lane_rows <= offset);
  const auto move_up = [&](auto& array) {
    auto* at = array.host();
    std::copy_backward(at + first_lane_rows, at + rows_, at + offset + rows_ - first_lane_rows);
  };
  move_up(buffers.ids);
  move_up(buffers.positions);
  move_up(buffers.row_sequence);
  move_up(buffers.may_defer);
  first_lane_rows_ = first_lane_rows;
  gap_ = offset - first_lane_rows;
  buffers.row_count[0] = first_lane_rows;
  buffers.row_count[1] = rows_ - first_lane_rows;
  const auto place = [&](auto& array, int count) {
    for (int i = 0; i < count; ++i) {
      auto& row = array[static_cast<size_t>(i)];
      row = place_of(row);
    }
  };
  place(buffers.sample_rows, samples_);
  place(buffers.prompt_rows, prompt_rows_);
}

void StepPlan::Rollback(SequenceTable& table) const {
  for (const PlannedSequence& planned : sequences_) {
    table.TruncateBlocks(planned.slot, planned.old_blocks);
    table.Deactivate(planned.slot);
  }
}

void StepPlan::AddRows(const SequenceStep& step, const Sequence& sequence, PlannedSequence& planned,
                       StepBuffers& buffers) {
  planned.rows = step.has_tokens() ? step.tokens().ids_size() : 1;
  const bool decode = !step.has_tokens();
  if (decode) decode_rows_ += planned.rows;
  const size_t place = sequences_.size();
  for (int i = 0; i < planned.rows; ++i) {
    const auto row = static_cast<size_t>(rows_ + i);
    buffers.ids[row] =
        step.has_tokens() ? static_cast<int32_t>(step.tokens().ids(i)) : sequence.last_token;
    buffers.positions[row] = static_cast<int32_t>(step.start_position()) + i;
    buffers.row_sequence[row] = static_cast<int32_t>(place);
    buffers.may_defer[row] = decode || defer_prefill_ ? 1 : 0;
  }
  std::copy(sequence.blocks.begin(), sequence.blocks.end(),
            buffers.block_table.host() + place * static_cast<size_t>(blocks_per_sequence_));
  rows_ += planned.rows;
}

void StepPlan::AddSample(const SequenceStep& step, const Sequence& s, PlannedSequence& planned,
                         StepBuffers& buffers) {
  planned.sample_index = samples_;
  const auto sample = static_cast<size_t>(samples_++);
  buffers.sample_rows[sample] = planned.first_row + planned.rows - 1;
  SampleParams params{.temperature = s.temperature,
                      .top_k = static_cast<int32_t>(std::min<uint32_t>(s.top_k, INT32_MAX)),
                      .top_p = s.top_p,
                      .min_p = s.min_p,
                      .presence_penalty = s.presence_penalty,
                      .frequency_penalty = s.frequency_penalty,
                      .repetition_penalty = s.repetition_penalty,
                      .seed = s.seed,
                      .position = int64_t{step.start_position()} + planned.rows,
                      .bias_begin = biases_,
                      .banned_begin = banned_};
  for (size_t i = 0; i < s.bias_ids.size(); ++i, ++biases_) {
    buffers.bias_ids[static_cast<size_t>(biases_)] = s.bias_ids[i];
    buffers.bias_values[static_cast<size_t>(biases_)] = s.bias_values[i];
  }
  if (s.bans_stop_ids()) {
    for (const int32_t token : s.stop_ids) {
      buffers.banned_ids[static_cast<size_t>(banned_++)] = token;
    }
  }
  params.bias_end = biases_;
  params.banned_end = banned_;
  if (s.has_penalties()) params.counts_row = planned.slot;
  buffers.params[sample] = params;
  buffers.sampled.top[sample] = std::max(s.top_logprobs, 0);
  wants_logprobs_ = wants_logprobs_ || s.top_logprobs >= 0;
}

void StepPlan::AddPromptLogprobs(const SequenceStep& step, const Sequence& sequence,
                                 PlannedSequence& planned, StepBuffers& buffers) {
  planned.prompt_begin = prompt_rows_;
  if (sequence.prompt_logprobs < 0 || !step.has_tokens()) return;
  // The logits of a row say how likely the token after it was.
  const int count = planned.rows - 1 + (step.has_next_prompt_id() ? 1 : 0);
  for (int i = 0; i < count; ++i) {
    const auto row = static_cast<size_t>(prompt_rows_ + i);
    const uint32_t target = i + 1 < planned.rows ? step.tokens().ids(i + 1) : step.next_prompt_id();
    buffers.prompt_rows[row] = planned.first_row + i;
    buffers.prompt.targets[row] = static_cast<int32_t>(target);
    buffers.prompt.top[row] = sequence.prompt_logprobs;
  }
  planned.prompt_count = count;
  prompt_rows_ += count;
}

void StepPlan::Upload(Backend& backend, const StepBuffers& buffers) const {
  const auto rows = static_cast<size_t>(extent());
  const auto samples = static_cast<size_t>(samples_);
  const auto prompt_rows = static_cast<size_t>(prompt_rows_);
  buffers.row_count.Upload(backend, buffers.row_count.size());
  buffers.ids.Upload(backend, rows);
  buffers.positions.Upload(backend, rows);
  buffers.row_sequence.Upload(backend, rows);
  buffers.block_table.Upload(backend,
                             sequences_.size() * static_cast<size_t>(blocks_per_sequence_));
  buffers.sample_count.Upload(backend, 1);
  buffers.sample_rows.Upload(backend, samples);
  buffers.params.Upload(backend, samples);
  buffers.bias_ids.Upload(backend, static_cast<size_t>(biases_));
  buffers.bias_values.Upload(backend, static_cast<size_t>(biases_));
  buffers.banned_ids.Upload(backend, static_cast<size_t>(banned_));
  buffers.sampled.top.Upload(backend, samples);
  buffers.prompt_rows.Upload(backend, prompt_rows);
  buffers.prompt.targets.Upload(backend, prompt_rows);
  buffers.prompt.top.Upload(backend, prompt_rows);
}

}  // namespace tandem::gpu
