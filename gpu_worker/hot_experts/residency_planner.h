#pragma once

// Which routed experts lie on the device: a fixed number of slots that all layers share, since an
// expert of any layer fits in any slot and one expert's hit saves the same reads as another's. The
// planner turns counts into migrations; whether it is time for swaps is its caller's to say
// (hot_policy.h).
//
// A swap loads into a spare slot and takes its victim's slot only when it is done, so the victim
// serves meanwhile. Some slots are kept spare for that.
//
//   planner.Fill(counts, &migrations) or Swap(counts, &migrations): at most max_in_flight at once,
//   in flight from here on; ... each is copied ...; between two steps: Finish(migration) or
//   Cancel(migration)
//
// Pure logic: no clock, no I/O. Thread safety: none. Nothing is allocated once slots are full.

#include <cstdint>
#include <span>
#include <vector>

#include "gpu_worker/hot_experts/expert_counts.h"

namespace tandem::gpu {

struct Migration {
  int layer = 0;  // by MoE layer
  int expert = 0;
  int slot = 0;  // where it goes
  // Who leaves when it is done; -1: nobody.
  int evicted_layer = -1;
  int evicted_expert = -1;
};

class ResidencyPlanner {
 public:
  static constexpr int kNoSlot = -1;

  struct Options {
    int layers = 0;
    int experts = 0;
    int slots = 0;
    int max_in_flight = 8;
    // A swap that gains fewer picks within the counts' window is not worth reading an expert for.
    double min_gain_picks = 3;
  };

  // REQUIRES: layers, experts and max_in_flight are positive.
  explicit ResidencyPlanner(const Options& options);

  // Append new migrations. REQUIRES: counts of the same shape. Fill: the busiest into free slots.
  // Swap: the busiest of the absent for the idlest residents, the largest gains first.
  void Fill(const ExpertCounts& counts, std::vector<Migration>* migrations);
  void Swap(const ExpertCounts& counts, std::vector<Migration>* migrations);
  void Finish(const Migration& migration);
  void Cancel(const Migration& migration);

  int slot_of(int layer, int expert) const { return slot_of_[Index(layer, expert)]; }
  // Experts that may be resident at once: slots but the spare ones.
  int capacity() const { return capacity_; }
  int resident() const { return resident_; }
  int in_flight() const { return in_flight_; }
  bool full() const { return resident_ + filling_ >= capacity_; }
  const Options& options() const { return options_; }

 private:
  enum class State : uint8_t { kAbsent, kLoading, kResident, kLeaving };

  size_t Index(int layer, int expert) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(options_.experts) +
           static_cast<size_t>(expert);
  }
  bool MayStart() const { return !spare_.empty() && in_flight_ < options_.max_in_flight; }
  void Rank(std::span<const float> counts);
  void Start(uint32_t in, std::vector<Migration>* migrations);

  const Options options_;
  const int capacity_;
  std::vector<State> state_;  // by index
  std::vector<int> slot_of_;  // by index
  std::vector<int> spare_;    // slots
  int resident_ = 0;          // those that leave among them
  int in_flight_ = 0;
  int filling_ = 0;  // of those in flight, without a victim
  // Of Rank: indices by count.
  std::vector<uint32_t> absent_;
  std::vector<uint32_t> victims_;
};

}  // namespace tandem::gpu
