#pragma once

// A model without arithmetic that keeps keys and values as the real one does: in blocks, through
// the sequence's block table. The "keys and values" of a position are a hash of all tokens up to
// it, read from the slot of the position before; a sampled token is a function of the last slot. So
// a wrong block, a block reused too early, a wrong position or a wrong prefix match changes the
// tokens, and Continuation() says what they must be.
//
// It also refuses what breaks the step protocol: unknown sequences, gaps in positions, tables that
// are too short, writes to a block that another live sequence holds, too many sequences.
//
// Thread safety: one owner. Shapes as in gpu_worker.proto.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tandem::testing {

struct FakeGroup {
  uint32_t block_tokens = 0;
  uint32_t block_count = 0;
};

struct FakeLimits {
  std::vector<uint32_t> stop_ids;
  uint32_t min_tokens = 0;
  uint32_t max_tokens = 0;
  uint64_t seed = 0;
};

enum class FakeEnd : uint8_t { kNone, kStopToken, kMaxTokens, kInactive };

struct FakeResult {
  std::vector<uint32_t> tokens = {};
  FakeEnd end = FakeEnd::kNone;
};

class FakeModel {
 public:
  FakeModel(std::vector<FakeGroup> groups, uint32_t max_sequences, uint32_t vocab_size);

  void Start(uint64_t sequence, FakeLimits limits);
  void AppendBlocks(uint64_t sequence, uint32_t group, std::span<const uint32_t> blocks);
  // Computes tokens at start_position ...; no tokens: the last sampled one.
  FakeResult Run(uint64_t sequence, uint32_t start_position,
                 std::optional<std::span<const uint32_t>> tokens, bool sample);
  void Release(uint64_t sequence);
  // A failed step leaves anything in the blocks that it wrote.
  void SpoilBlock(uint32_t group, uint32_t block, uint32_t first_offset);
  // Nothing more is computed for it: its steps give kInactive.
  void Deactivate(uint64_t sequence);
  // From now on the n-th generated token of every sequence is script[n % size]; empty: by hash.
  void set_script(std::vector<uint32_t> script) { script_ = std::move(script); }
  void ReleaseAll() { sequences_.clear(); }

  size_t sequences() const { return sequences_.size(); }
  // The first thing that broke the protocol; empty if nothing.
  const std::string& error() const { return error_; }

  // What the model generates after `prompt`, stopping as `limits` say (the stop token included).
  std::vector<uint32_t> Continuation(std::span<const uint32_t> prompt,
                                     const FakeLimits& limits) const;

 private:
  struct Sequence {
    FakeLimits limits;
    std::vector<std::vector<uint32_t>> tables = {};
    std::optional<uint32_t> next_position = {};
    std::optional<uint32_t> last_sampled = {};
    uint32_t generated = 0;
    bool finished = false;
  };

  void Fail(std::string what);
  bool Write(const Sequence& sequence, uint32_t position, uint32_t token);
  std::optional<uint64_t*> Slot(const Sequence& sequence, size_t group, uint32_t position);
  uint32_t Sample(uint64_t state, const FakeLimits& limits, uint32_t generated) const;

  std::vector<FakeGroup> groups_;
  uint32_t max_sequences_;
  uint32_t vocab_size_;
  std::vector<std::vector<uint64_t>> slots_;  // [group][block * block_tokens + offset]
  std::map<uint64_t, Sequence> sequences_;
  std::set<uint64_t> used_ids_;
  std::string error_;
  std::vector<uint32_t> script_;
};

}  // namespace tandem::testing
