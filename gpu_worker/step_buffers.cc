#include "gpu_worker/step_buffers.h"

#include <algorithm>

namespace tandem::gpu {

absl::Status LogprobBuffers::Create(Backend& backend, size_t rows, int max_logprobs) {
  max_top = std::max(max_logprobs, 1);
  const size_t entries = rows * static_cast<size_t>(max_top);
  RETURN_IF_ERROR(targets.Create(backend, rows));
  RETURN_IF_ERROR(top.Create(backend, rows));
  RETURN_IF_ERROR(logprobs.Create(backend, rows));
  RETURN_IF_ERROR(ranks.Create(backend, rows));
  RETURN_IF_ERROR(top_ids.Create(backend, entries));
  return top_logprobs.Create(backend, entries);
}

LogprobsArgs LogprobBuffers::Args(Rows rows, ConstMatrix logits, int64_t vocab,
                                  size_t first_row) const {
  return {.rows = rows,
          .logits = logits,
          .vocab = vocab,
          .targets = targets.device() + first_row,
          .top = top.device() + first_row,
          .max_top = max_top,
          .target_logprobs = logprobs.device() + first_row,
          .target_ranks = ranks.device() + first_row,
          .top_ids = top_ids.device() + first_row * static_cast<size_t>(max_top),
          .top_logprobs = top_logprobs.device() + first_row * static_cast<size_t>(max_top)};
}

void LogprobBuffers::Download(Backend& backend, size_t count) {
  logprobs.Download(backend, count);
  ranks.Download(backend, count);
  top_ids.Download(backend, count * static_cast<size_t>(max_top));
  top_logprobs.Download(backend, count * static_cast<size_t>(max_top));
}

absl::Status StepBuffers::Create(Backend& backend, const SequenceLimits& limits,
                                 const Sizes& sizes) {
  const auto rows = static_cast<size_t>(sizes.rows);
  const auto sequences = static_cast<size_t>(limits.max_sequences);
  RETURN_IF_ERROR(row_count.Create(backend, kMaxLanes));
  RETURN_IF_ERROR(ids.Create(backend, rows));
  RETURN_IF_ERROR(positions.Create(backend, rows));
  RETURN_IF_ERROR(row_sequence.Create(backend, rows));
  RETURN_IF_ERROR(may_defer.Create(backend, rows));
  RETURN_IF_ERROR(deferral.Create(backend, 1));
  RETURN_IF_ERROR(stamps.Create(backend, static_cast<size_t>(sizes.stamps)));
  RETURN_IF_ERROR(step_stamps.Create(backend, 1));
  RETURN_IF_ERROR(
      block_table.Create(backend, sequences * static_cast<size_t>(limits.blocks_per_sequence())));
  RETURN_IF_ERROR(sample_count.Create(backend, 1));
  RETURN_IF_ERROR(sample_rows.Create(backend, sequences));
  RETURN_IF_ERROR(params.Create(backend, sequences));
  RETURN_IF_ERROR(bias_ids.Create(backend, sequences * kMaxLogitBias));
  RETURN_IF_ERROR(bias_values.Create(backend, sequences * kMaxLogitBias));
  RETURN_IF_ERROR(banned_ids.Create(backend, sequences * kMaxStopIds));
  RETURN_IF_ERROR(tokens.Create(backend, sequences));
  RETURN_IF_ERROR(sampled.Create(backend, sequences, limits.max_logprobs));
  const auto chunk = static_cast<size_t>(sizes.head_rows);
  const auto prompt_count = static_cast<size_t>(limits.max_step_rows);
  RETURN_IF_ERROR(prompt_counts.Create(backend, (prompt_count + chunk - 1) / chunk));
  RETURN_IF_ERROR(prompt_rows.Create(backend, prompt_count));
  RETURN_IF_ERROR(prompt.Create(backend, prompt_count, limits.max_logprobs));
  RETURN_IF_ERROR(copy_source.Create(backend, kCopiesAtOnce));
  return copy_target.Create(backend, kCopiesAtOnce);
}

}  // namespace tandem::gpu
