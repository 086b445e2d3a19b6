#include "gpu_worker/step_validator.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace tandem::gpu {
namespace {

using worker::v1::SequenceStart;
using worker::v1::SequenceStep;
using worker::v1::Step;

absl::Status Invalid(uint64_t sequence, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("sequence ", sequence, ": ", what));
}

int IndexOfStart(const Step& step, uint64_t id, int end) {
  for (int i = 0; i < end; ++i) {
    if (step.starts(i).sequence_id() == id) return i;
  }
  return -1;
}

int64_t TokenCount(const SequenceStep& sequence) {
  return sequence.has_tokens() ? sequence.tokens().ids_size() : 1;
}

}  // namespace

StepValidator::StepValidator(const SequenceLimits& limits)
    : limits_(limits),
      released_(static_cast<size_t>(limits.max_sequences)),
      seen_(static_cast<size_t>(limits.max_sequences)),
      start_seen_(static_cast<size_t>(limits.max_sequences)) {}

absl::Status StepValidator::Check(const Step& step, const SequenceTable& table) {
  std::fill(released_.begin(), released_.end(), 0);
  std::fill(seen_.begin(), seen_.end(), 0);
  std::fill(start_seen_.begin(), start_seen_.end(), 0);
  RETURN_IF_ERROR(CheckReleasesAndStarts(step, table));
  RETURN_IF_ERROR(CheckCopies(step));
  if (step.sequences_size() > limits_.max_sequences) {
    return absl::InvalidArgumentError(absl::StrCat("step has ", step.sequences_size(),
                                                   " sequences, at most ", limits_.max_sequences));
  }
  int64_t rows = 0;
  for (const SequenceStep& sequence : step.sequences()) {
    RETURN_IF_ERROR(CheckSequence(step, table, sequence, rows));
  }
  if (rows > limits_.max_step_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("step has ", rows, " rows, at most ", limits_.max_step_rows));
  }
  return absl::OkStatus();
}

absl::Status StepValidator::CheckReleasesAndStarts(const Step& step, const SequenceTable& table) {
  int used = table.used();
  for (const uint64_t id : step.release_sequence_ids()) {
    const int slot = table.Find(id);
    if (slot < 0 || released_[static_cast<size_t>(slot)] != 0) continue;
    released_[static_cast<size_t>(slot)] = 1;
    --used;
  }
  if (used + step.starts_size() > limits_.max_sequences) {
    return absl::InvalidArgumentError(absl::StrCat("step starts ", step.starts_size(),
                                                   " sequences beside ", used, ", at most ",
                                                   limits_.max_sequences, " fit"));
  }
  for (int i = 0; i < step.starts_size(); ++i) {
    const SequenceStart& start = step.starts(i);
    const int slot = table.Find(start.sequence_id());
    if ((slot >= 0 && released_[static_cast<size_t>(slot)] == 0) ||
        IndexOfStart(step, start.sequence_id(), i) >= 0) {
      return Invalid(start.sequence_id(), "is started twice");
    }
    RETURN_IF_ERROR(CheckStart(start));
  }
  return absl::OkStatus();
}

absl::Status StepValidator::CheckStart(const SequenceStart& start) const {
  const uint64_t id = start.sequence_id();
  const auto in_vocab = [&](uint32_t token) {
    return token < static_cast<uint32_t>(limits_.vocab);
  };
  RETURN_IF_ERROR(CheckSampling(start));
  const auto& stop_ids = start.stopping().stop_token_ids();
  if (stop_ids.size() > kMaxStopIds) {
    return Invalid(id, absl::StrCat(stop_ids.size(), " stop ids, at most ", kMaxStopIds));
  }
  if (!std::all_of(stop_ids.begin(), stop_ids.end(), in_vocab)) {
    return Invalid(id, "a stop id is outside the vocabulary");
  }
  for (const auto* ids : {&start.penalty_prompt_ids(), &start.penalty_output_ids()}) {
    if (ids->size() > limits_.max_context || !std::all_of(ids->begin(), ids->end(), in_vocab)) {
      return Invalid(id, "penalty ids are too many or outside the vocabulary");
    }
  }
  if (start.prompt_logprobs() < -1 || start.prompt_logprobs() > limits_.max_logprobs) {
    return Invalid(id, absl::StrCat("prompt_logprobs must be in [-1, ", limits_.max_logprobs, "]"));
  }
  return absl::OkStatus();
}

absl::Status StepValidator::CheckSampling(const SequenceStart& start) const {
  const uint64_t id = start.sequence_id();
  const worker::v1::Sampling& s = start.sampling();
  // Written so that NaN fails.
  if (!(s.temperature() >= 0 && std::isfinite(s.temperature()))) {
    return Invalid(id, "temperature must be a number >= 0");
  }
  if (!(s.top_p() > 0 && s.top_p() <= 1)) return Invalid(id, "top_p must be in (0, 1]");
  if (!(s.min_p() >= 0 && s.min_p() <= 1)) return Invalid(id, "min_p must be in [0, 1]");
  if (!(s.repetition_penalty() > 0 && std::isfinite(s.repetition_penalty()))) {
    return Invalid(id, "repetition_penalty must be a number > 0");
  }
  if (!std::isfinite(s.presence_penalty()) || !std::isfinite(s.frequency_penalty())) {
    return Invalid(id, "penalties must be numbers");
  }
  if (s.top_logprobs() < -1 || s.top_logprobs() > limits_.max_logprobs) {
    return Invalid(id, absl::StrCat("top_logprobs must be in [-1, ", limits_.max_logprobs, "]"));
  }
  if (s.logit_bias_size() > kMaxLogitBias) {
    return Invalid(
        id, absl::StrCat(s.logit_bias_size(), " logit_bias entries, at most ", kMaxLogitBias));
  }
  for (const auto& [token, value] : s.logit_bias()) {
    if (token >= static_cast<uint32_t>(limits_.vocab) || !std::isfinite(value)) {
      return Invalid(id, "a logit_bias entry is outside the vocabulary or not a number");
    }
  }
  return absl::OkStatus();
}

absl::Status StepValidator::CheckCopies(const Step& step) const {
  const auto blocks = static_cast<uint32_t>(limits_.block_count);
  if (step.block_copies_size() > limits_.block_count) {
    return absl::InvalidArgumentError("more block copies than blocks");
  }
  for (const auto& copy : step.block_copies()) {
    if (copy.cache_group() != 0 || copy.source_block() >= blocks || copy.target_block() >= blocks) {
      return absl::InvalidArgumentError(absl::StrCat("block copy ", copy.source_block(), " to ",
                                                     copy.target_block(), " of cache group ",
                                                     copy.cache_group(), " is out of range"));
    }
  }
  return absl::OkStatus();
}

absl::Status StepValidator::Locate(const Step& step, const SequenceTable& table, uint64_t id,
                                   const Sequence*& known) {
  known = nullptr;
  uint8_t* seen = nullptr;
  const int start = IndexOfStart(step, id, step.starts_size());
  if (start >= 0) {
    seen = &start_seen_[static_cast<size_t>(start)];
  } else {
    const int slot = table.Find(id);
    if (slot < 0 || released_[static_cast<size_t>(slot)] != 0) {
      return Invalid(id, "is unknown");
    }
    known = &table.at(slot);
    seen = &seen_[static_cast<size_t>(slot)];
  }
  if (*seen != 0) return Invalid(id, "is twice in the step");
  *seen = 1;
  return absl::OkStatus();
}

absl::Status StepValidator::CheckSequence(const Step& step, const SequenceTable& table,
                                          const SequenceStep& sequence, int64_t& rows) {
  const Sequence* known = nullptr;
  RETURN_IF_ERROR(Locate(step, table, sequence.sequence_id(), known));
  // The gateway cannot know yet that it ended: nothing of it will be looked at.
  if (known != nullptr && known->state == SequenceState::kInactive) return absl::OkStatus();
  RETURN_IF_ERROR(CheckInput(sequence, known));
  rows += TokenCount(sequence);
  return CheckPlace(sequence, known);
}

absl::Status StepValidator::CheckInput(const SequenceStep& sequence, const Sequence* known) const {
  const uint64_t id = sequence.sequence_id();
  const auto vocab = static_cast<uint32_t>(limits_.vocab);
  if (sequence.masked()) return Invalid(id, "token masks are not supported");
  if (sequence.state_slot() != 0) return Invalid(id, "the model has no recurrent state");
  if (sequence.has_next_prompt_id() && sequence.next_prompt_id() >= vocab) {
    return Invalid(id, "next_prompt_id is outside the vocabulary");
  }
  if (sequence.has_tokens()) {
    const auto& ids = sequence.tokens().ids();
    if (ids.empty()) return Invalid(id, "has no tokens");
    if (ids.size() > limits_.max_step_rows) {
      return Invalid(
          id, absl::StrCat(ids.size(), " tokens, at most ", limits_.max_step_rows, " a step"));
    }
    const bool in_vocab =
        std::all_of(ids.begin(), ids.end(), [&](uint32_t token) { return token < vocab; });
    return in_vocab ? absl::OkStatus() : Invalid(id, "a token is outside the vocabulary");
  }
  if (!sequence.last_sampled()) return Invalid(id, "has neither tokens nor last_sampled");
  if (known == nullptr || known->last_token < 0) return Invalid(id, "has not sampled a token yet");
  return absl::OkStatus();
}

absl::Status StepValidator::CheckPlace(const SequenceStep& sequence, const Sequence* known) const {
  const uint64_t id = sequence.sequence_id();
  const int64_t start = sequence.start_position();
  const int64_t end = start + TokenCount(sequence);
  if (known != nullptr && known->started && start != known->next_position) {
    return Invalid(
        id, absl::StrCat("starts at position ", start, ", ", known->next_position, " comes next"));
  }
  if (end > limits_.max_context) {
    return Invalid(
        id, absl::StrCat("reaches position ", end, ", the context holds ", limits_.max_context));
  }
  int64_t blocks = known == nullptr ? 0 : static_cast<int64_t>(known->blocks.size());
  for (const auto& append : sequence.block_appends()) {
    if (append.cache_group() != 0) return Invalid(id, "names an unknown cache group");
    for (const uint32_t block : append.block_ids()) {
      if (block >= static_cast<uint32_t>(limits_.block_count)) {
        return Invalid(id, absl::StrCat("block ", block, " is out of range"));
      }
    }
    blocks += append.block_ids_size();
  }
  if (blocks > limits_.blocks_per_sequence()) {
    return Invalid(
        id, absl::StrCat("has ", blocks, " blocks, at most ", limits_.blocks_per_sequence()));
  }
  if (blocks < limits_.BlocksFor(end)) {
    return Invalid(id, absl::StrCat("has ", blocks, " blocks, position ", end, " needs ",
                                    limits_.BlocksFor(end)));
  }
  return absl::OkStatus();
}

}  // namespace tandem::gpu
