#include "tests/fakes/fake_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::testing {
namespace {

// splitmix64's finalizer (Steele, Lea, Flood 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t Next(uint64_t state, uint32_t token) { return Mix(state ^ Mix(token + 1)); }

constexpr uint64_t kOrigin = 17;

}  // namespace

FakeModel::FakeModel(std::vector<FakeGroup> groups, uint32_t max_sequences, uint32_t vocab_size)
    : groups_(std::move(groups)), max_sequences_(max_sequences), vocab_size_(vocab_size) {
  for (const FakeGroup& group : groups_) {
    slots_.emplace_back(size_t{group.block_tokens} * group.block_count, 0);
  }
}

void FakeModel::Fail(std::string what) {
  if (error_.empty()) error_ = std::move(what);
}

void FakeModel::Start(uint64_t sequence, FakeLimits limits) {
  if (!used_ids_.insert(sequence).second)
    Fail(absl::StrCat("sequence ", sequence, " started twice"));
  sequences_[sequence] = {.limits = std::move(limits),
                          .tables = std::vector<std::vector<uint32_t>>(groups_.size())};
  if (sequences_.size() > max_sequences_) Fail(absl::StrCat(sequences_.size(), " sequences"));
}

void FakeModel::AppendBlocks(uint64_t sequence, uint32_t group, std::span<const uint32_t> blocks) {
  const auto it = sequences_.find(sequence);
  if (it == sequences_.end() || group >= groups_.size()) {
    return Fail(absl::StrCat("blocks for sequence ", sequence, " group ", group));
  }
  for (const uint32_t block : blocks) {
    if (block >= groups_[group].block_count) return Fail(absl::StrCat("block ", block));
    it->second.tables[group].push_back(block);
  }
}

void FakeModel::SpoilBlock(uint32_t group, uint32_t block, uint32_t first_offset) {
  const size_t size = groups_[group].block_tokens;
  for (size_t i = first_offset; i < size; ++i) slots_[group][block * size + i] ^= 0xbad;
}

void FakeModel::Deactivate(uint64_t sequence) {
  const auto it = sequences_.find(sequence);
  if (it != sequences_.end()) it->second.finished = true;
}

void FakeModel::Release(uint64_t sequence) { sequences_.erase(sequence); }

std::optional<uint64_t*> FakeModel::Slot(const Sequence& sequence, size_t group,
                                         uint32_t position) {
  const uint32_t size = groups_[group].block_tokens;
  const std::vector<uint32_t>& table = sequence.tables[group];
  if (position / size >= table.size()) return std::nullopt;
  return &slots_[group][size_t{table[position / size]} * size + position % size];
}

bool FakeModel::Write(const Sequence& sequence, uint32_t position, uint32_t token) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto slot = Slot(sequence, g, position);
    if (!slot) return false;
    const uint32_t block = sequence.tables[g][position / groups_[g].block_tokens];
    for (const auto& [id, other] : sequences_) {
      const auto& table = other.tables[g];
      if (&other != &sequence && std::find(table.begin(), table.end(), block) != table.end()) {
        Fail(absl::StrCat("block ", block, " is written while sequence ", id, " holds it"));
      }
    }
    const uint64_t before = position == 0 ? kOrigin : **Slot(sequence, g, position - 1);
    **slot = Next(before, token);
  }
  return true;
}

uint32_t FakeModel::Sample(uint64_t state, const FakeLimits& limits, uint32_t generated) const {
  if (!script_.empty()) return script_[generated % script_.size()];
  const std::vector<uint32_t>& stops = limits.stop_ids;
  for (uint64_t draw = state ^ Mix(limits.seed);; draw = Mix(draw)) {
    const auto token = static_cast<uint32_t>(Mix(draw) % vocab_size_);
    const bool stop = std::find(stops.begin(), stops.end(), token) != stops.end();
    if (!stop || generated >= limits.min_tokens) return token;
  }
}

FakeResult FakeModel::Run(uint64_t sequence, uint32_t start_position,
                          std::optional<std::span<const uint32_t>> tokens, bool sample) {
  const auto it = sequences_.find(sequence);
  if (it == sequences_.end()) {
    Fail(absl::StrCat("step of unknown sequence ", sequence));
    return {};
  }
  Sequence& s = it->second;
  if (s.finished) return {.tokens = {}, .end = FakeEnd::kInactive};
  if (s.next_position && *s.next_position != start_position) {
    Fail(absl::StrCat("sequence ", sequence, " at ", start_position, ", not ", *s.next_position));
  }
  std::vector<uint32_t> input;
  if (tokens) {
    input.assign(tokens->begin(), tokens->end());
  } else if (s.last_sampled) {
    input.push_back(*s.last_sampled);
  }
  if (input.empty()) {
    Fail(absl::StrCat("sequence ", sequence, ": no input"));
    return {};
  }
  uint32_t position = start_position;
  for (const uint32_t token : input) {
    if (!Write(s, position++, token)) {
      Fail(absl::StrCat("sequence ", sequence, ": no block for position ", position - 1));
      return {};
    }
  }
  s.next_position = position;
  if (!sample) return {};
  for (size_t g = 1; g < groups_.size(); ++g) {
    if (**Slot(s, g, position - 1) != **Slot(s, 0, position - 1)) Fail("groups disagree");
  }
  const uint32_t token = Sample(**Slot(s, 0, position - 1), s.limits, s.generated);
  s.last_sampled = token;
  ++s.generated;
  const auto& stops = s.limits.stop_ids;
  FakeEnd end = FakeEnd::kNone;
  if (s.generated >= s.limits.max_tokens) end = FakeEnd::kMaxTokens;
  if (std::find(stops.begin(), stops.end(), token) != stops.end()) end = FakeEnd::kStopToken;
  s.finished = end != FakeEnd::kNone;
  return {.tokens = {token}, .end = end};
}

std::vector<uint32_t> FakeModel::Continuation(std::span<const uint32_t> prompt,
                                              const FakeLimits& limits) const {
  uint64_t state = kOrigin;
  for (const uint32_t token : prompt) state = Next(state, token);
  std::vector<uint32_t> out;
  while (out.size() < limits.max_tokens) {
    out.push_back(Sample(state, limits, static_cast<uint32_t>(out.size())));
    state = Next(state, out.back());
    const auto& stops = limits.stop_ids;
    if (std::find(stops.begin(), stops.end(), out.back()) != stops.end()) break;
  }
  return out;
}

}  // namespace tandem::testing
