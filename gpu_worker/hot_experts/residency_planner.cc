#include "gpu_worker/hot_experts/residency_planner.h"

#include <algorithm>

#include "common/base/check.h"

namespace tandem::gpu {
namespace {

// Of few slots one is spare, of many as many as migrations may be under way.
int SpareSlots(int slots, int max_in_flight) {
  return std::min(max_in_flight, std::max(1, slots / 8));
}

// The `count` first by `less`, in order; the rest after them in any.
template <typename Less>
void SortFirst(std::vector<uint32_t>& indices, size_t count, Less less) {
  const auto middle = indices.begin() + static_cast<ptrdiff_t>(std::min(count, indices.size()));
  std::partial_sort(indices.begin(), middle, indices.end(), less);
}

}  // namespace

ResidencyPlanner::ResidencyPlanner(const Options& options)
    : options_(options),
      capacity_(std::max(0, options.slots - SpareSlots(options.slots, options.max_in_flight))) {
  TANDEM_CHECK(options.layers > 0 && options.experts > 0 && options.max_in_flight > 0);
  const size_t entries = static_cast<size_t>(options.layers) * static_cast<size_t>(options.experts);
  state_.assign(entries, State::kAbsent);
  slot_of_.assign(entries, kNoSlot);
  for (int slot = options.slots - 1; slot >= 0; --slot) spare_.push_back(slot);
  absent_.reserve(entries);
  victims_.reserve(spare_.size());
}

// absent_: the busiest first; victims_: the idlest first; as many in order as may start. Ties by
// index, so that plans depend on the counts alone.
void ResidencyPlanner::Rank(std::span<const float> counts) {
  TANDEM_DCHECK(counts.size() == state_.size());
  absent_.clear();
  victims_.clear();
  for (uint32_t i = 0; i < state_.size(); ++i) {
    if (state_[i] == State::kAbsent && counts[i] > 0) absent_.push_back(i);
    if (state_[i] == State::kResident) victims_.push_back(i);
  }
  const auto wanted = static_cast<size_t>(options_.max_in_flight);
  SortFirst(absent_, wanted, [counts](uint32_t a, uint32_t b) {
    return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
  });
  SortFirst(victims_, wanted, [counts](uint32_t a, uint32_t b) {
    return counts[a] != counts[b] ? counts[a] < counts[b] : a < b;
  });
}

void ResidencyPlanner::Fill(const ExpertCounts& counts, std::vector<Migration>* migrations) {
  if (full() || !MayStart()) return;
  Rank(counts.values());
  for (const uint32_t in : absent_) {
    if (full() || !MayStart()) return;
    ++filling_;
    Start(in, migrations);
  }
}

void ResidencyPlanner::Swap(const ExpertCounts& counts, std::vector<Migration>* migrations) {
  if (!MayStart()) return;
  Rank(counts.values());
  const float least = static_cast<float>(options_.min_gain_picks) * counts.unit();
  for (size_t i = 0; i < std::min(absent_.size(), victims_.size()) && MayStart(); ++i) {
    const uint32_t in = absent_[i];
    const uint32_t out = victims_[i];
    if (counts.values()[in] - counts.values()[out] < least) return;  // the others gain less
    Start(in, migrations);
    state_[out] = State::kLeaving;
    migrations->back().evicted_layer = static_cast<int>(out) / options_.experts;
    migrations->back().evicted_expert = static_cast<int>(out) % options_.experts;
  }
}

void ResidencyPlanner::Start(uint32_t in, std::vector<Migration>* migrations) {
  ++in_flight_;
  state_[in] = State::kLoading;
  migrations->push_back({.layer = static_cast<int>(in) / options_.experts,
                         .expert = static_cast<int>(in) % options_.experts,
                         .slot = spare_.back()});
  spare_.pop_back();
}

void ResidencyPlanner::Finish(const Migration& migration) {
  const size_t in = Index(migration.layer, migration.expert);
  TANDEM_DCHECK(state_[in] == State::kLoading);
  --in_flight_;
  state_[in] = State::kResident;
  slot_of_[in] = migration.slot;
  if (migration.evicted_layer < 0) {
    --filling_;
    ++resident_;
    return;
  }
  const size_t out = Index(migration.evicted_layer, migration.evicted_expert);
  TANDEM_DCHECK(state_[out] == State::kLeaving);
  state_[out] = State::kAbsent;
  spare_.push_back(slot_of_[out]);
  slot_of_[out] = kNoSlot;
}

void ResidencyPlanner::Cancel(const Migration& migration) {
  --in_flight_;
  state_[Index(migration.layer, migration.expert)] = State::kAbsent;
  spare_.push_back(migration.slot);
  if (migration.evicted_layer < 0) {
    --filling_;
  } else {
    state_[Index(migration.evicted_layer, migration.evicted_expert)] = State::kResident;
  }
}

}  // namespace tandem::gpu
