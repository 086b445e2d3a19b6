#pragma once

// What the worker knows of each sequence between steps: block tables, position, last sampled token,
// sampling and stopping rules. Plain bookkeeping without tensors.
//
// A sequence is active from its start until it finishes (stop token, max_tokens), dies (its numbers
// are not finite) or is lost (its step failed); then it is inactive until released: steps that were
// already on their way compute nothing for it.
//
// Everything that the protocol can break is checked before (step_validator.h); the methods here
// CHECK. Thread safety: none; one thread owns it. After construction only Start may allocate, and
// only to grow a slot beyond what earlier sequences needed.

#include <cstdint>
#include <vector>

#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

// Bounds of the protocol, so that buffers have a size and a broken gateway cannot make us grow.
inline constexpr int kMaxLogitBias = 1024;  // entries a sequence
inline constexpr int kMaxStopIds = 256;     // entries a sequence

struct SequenceLimits {
  int max_sequences = 0;
  int max_context = 0;
  int max_step_rows = 0;
  int vocab = 0;
  int block_tokens = 0;
  int block_count = 0;
  int max_logprobs = 20;  // top entries a position

  int BlocksFor(int64_t tokens) const {
    return static_cast<int>((tokens + block_tokens - 1) / block_tokens);
  }
  int blocks_per_sequence() const { return BlocksFor(max_context); }
};

enum class SequenceState : uint8_t { kFree, kActive, kInactive };

struct Sequence {
  uint64_t id = 0;
  SequenceState state = SequenceState::kFree;
  bool started = false;        // a step has committed
  uint32_t next_position = 0;  // meaningful once started
  int32_t last_token = -1;     // -1: none sampled yet
  uint32_t produced = 0;       // tokens sampled
  std::vector<int32_t> blocks;

  float temperature = 0;
  float top_p = 1;
  float min_p = 0;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  float repetition_penalty = 1;
  uint32_t top_k = 0;
  uint64_t seed = 0;
  std::vector<int32_t> bias_ids;  // ascending
  std::vector<float> bias_values;
  std::vector<int32_t> stop_ids;  // ascending
  uint32_t min_tokens = 0;
  uint32_t max_tokens = 0;   // 0: until the context is full
  int top_logprobs = -1;     // -1: none
  int prompt_logprobs = -1;  // -1: none

  bool has_penalties() const {
    return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1;
  }
  bool bans_stop_ids() const { return produced < min_tokens; }
};

class SequenceTable {
 public:
  explicit SequenceTable(const SequenceLimits& limits);

  const SequenceLimits& limits() const { return limits_; }
  int slots() const { return static_cast<int>(sequences_.size()); }
  int used() const { return used_; }
  // -1 when unknown.
  int Find(uint64_t id) const;
  const Sequence& at(int slot) const { return sequences_[static_cast<size_t>(slot)]; }

  // Returns the slot. REQUIRES: a free slot, a new id, a start that the validator accepted.
  int Start(const worker::v1::SequenceStart& start);
  // Ignores an unknown id.
  void Release(uint64_t id);
  void Clear();

  // Appends the blocks of a step; Truncate undoes it. REQUIRES: validated.
  void AppendBlocks(int slot, const worker::v1::SequenceStep& step);
  void TruncateBlocks(int slot, size_t size);
  void Deactivate(int slot);
  // The step wrote `tokens` positions from `start_position`.
  void Advance(int slot, uint32_t start_position, uint32_t tokens);
  // Records a sampled token and says whether it ends the sequence, which is then inactive.
  worker::v1::WorkerFinish TakeToken(int slot, int32_t token);

 private:
  Sequence& Slot(int slot) { return sequences_[static_cast<size_t>(slot)]; }

  const SequenceLimits limits_;
  std::vector<Sequence> sequences_;
  int used_ = 0;
};

}  // namespace tandem::gpu
