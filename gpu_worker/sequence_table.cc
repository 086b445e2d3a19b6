#include "gpu_worker/sequence_table.h"

#include <algorithm>

#include "common/base/check.h"

namespace tandem::gpu {

using worker::v1::WorkerFinish;

SequenceTable::SequenceTable(const SequenceLimits& limits) : limits_(limits) {
  TANDEM_CHECK(limits.max_sequences > 0 && limits.max_context > 0 && limits.block_tokens > 0);
  sequences_.resize(static_cast<size_t>(limits.max_sequences));
  for (Sequence& sequence : sequences_) {
    sequence.blocks.reserve(static_cast<size_t>(limits.blocks_per_sequence()));
  }
}

int SequenceTable::Find(uint64_t id) const {
  // A scan: there are at most a few hundred slots, and a hash map would allocate.
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i].state != SequenceState::kFree && sequences_[i].id == id) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int SequenceTable::Start(const worker::v1::SequenceStart& start) {
  const auto free = std::find_if(sequences_.begin(), sequences_.end(),
                                 [](const Sequence& s) { return s.state == SequenceState::kFree; });
  TANDEM_CHECK(free != sequences_.end());
  Sequence& s = *free;
  const worker::v1::Sampling& sampling = start.sampling();
  const worker::v1::Stopping& stopping = start.stopping();
  s.id = start.sequence_id();
  s.state = SequenceState::kActive;
  s.started = false;
  s.next_position = 0;
  s.last_token = -1;
  s.produced = 0;
  s.blocks.clear();
  s.temperature = sampling.temperature();
  s.top_p = sampling.top_p();
  s.min_p = sampling.min_p();
  s.presence_penalty = sampling.presence_penalty();
  s.frequency_penalty = sampling.frequency_penalty();
  s.repetition_penalty = sampling.repetition_penalty();
  s.top_k = sampling.top_k();
  s.seed = sampling.seed();
  s.bias_ids.clear();
  s.bias_values.clear();
  for (const auto& [token, value] : sampling.logit_bias()) {
    s.bias_ids.push_back(static_cast<int32_t>(token));
  }
  std::sort(s.bias_ids.begin(), s.bias_ids.end());
  for (const int32_t token : s.bias_ids) {
    s.bias_values.push_back(sampling.logit_bias().at(static_cast<uint32_t>(token)));
  }
  s.stop_ids.assign(stopping.stop_token_ids().begin(), stopping.stop_token_ids().end());
  std::sort(s.stop_ids.begin(), s.stop_ids.end());
  s.min_tokens = stopping.min_tokens();
  s.max_tokens = stopping.max_tokens();
  s.top_logprobs = sampling.top_logprobs();
  s.prompt_logprobs = start.prompt_logprobs();
  ++used_;
  return static_cast<int>(free - sequences_.begin());
}

void SequenceTable::Release(uint64_t id) {
  const int slot = Find(id);
  if (slot < 0) return;
  Slot(slot).state = SequenceState::kFree;
  --used_;
}

void SequenceTable::Clear() {
  for (Sequence& sequence : sequences_) sequence.state = SequenceState::kFree;
  used_ = 0;
}

void SequenceTable::AppendBlocks(int slot, const worker::v1::SequenceStep& step) {
  Sequence& sequence = Slot(slot);
  for (const auto& append : step.block_appends()) {
    for (const uint32_t block : append.block_ids()) {
      sequence.blocks.push_back(static_cast<int32_t>(block));
    }
  }
}

void SequenceTable::TruncateBlocks(int slot, size_t size) {
  TANDEM_CHECK(size <= Slot(slot).blocks.size());
  Slot(slot).blocks.resize(size);
}

void SequenceTable::Deactivate(int slot) { Slot(slot).state = SequenceState::kInactive; }

void SequenceTable::Advance(int slot, uint32_t start_position, uint32_t tokens) {
  Sequence& sequence = Slot(slot);
  sequence.started = true;
  sequence.next_position = start_position + tokens;
}

WorkerFinish SequenceTable::TakeToken(int slot, int32_t token) {
  Sequence& sequence = Slot(slot);
  TANDEM_CHECK(sequence.state == SequenceState::kActive && token >= 0 && token < limits_.vocab);
  sequence.last_token = token;
  ++sequence.produced;
  WorkerFinish finish = worker::v1::WORKER_FINISH_NONE;
  if (std::binary_search(sequence.stop_ids.begin(), sequence.stop_ids.end(), token)) {
    finish = worker::v1::WORKER_FINISH_STOP_TOKEN;
  } else if (sequence.max_tokens > 0 && sequence.produced >= sequence.max_tokens) {
    finish = worker::v1::WORKER_FINISH_MAX_TOKENS;
  }
  if (finish != worker::v1::WORKER_FINISH_NONE) Deactivate(slot);
  return finish;
}

}  // namespace tandem::gpu
