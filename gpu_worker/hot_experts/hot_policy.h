#pragma once

// When experts move: counts in two windows, each naming the experts that it would hold, and a
// running comparison of these choices with the residents on the picks that follow.
//
// A choice's picks that the residents miss, and the residents' that it misses, are counted with a
// short memory. Only where the choice leads by `confidence` standard deviations are experts swapped
// for it. So uniform traffic moves nothing, however counts fluctuate; noise of a short window that
// does not last moves nothing either; a shift is acted upon as soon as the short window's choice
// would have done better, and rare experts are told apart by the long one.
//
//   per step:  policy.Add(layer, picks) for every layer; policy.EndStep();
//              policy.Plan(&migrations); ... Finish or Cancel as residency_planner.h says
//
// Pure logic: no clock, no I/O. Thread safety: none. Nothing is allocated once slots are full.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu_worker/hot_experts/expert_counts.h"
#include "gpu_worker/hot_experts/residency_planner.h"

namespace tandem::gpu {

class HotPolicy {
 public:
  struct Options {
    ResidencyPlanner::Options planner;
    // After a shift of the traffic the new busy experts lead the short window after so many steps.
    double short_half_life_steps = 32;
    double long_half_life_steps = 512;
    double confidence = 4;
    // Before that nothing is loaded: a handful of picks tells nothing.
    uint64_t min_steps = 16;
  };

  explicit HotPolicy(const Options& options);

  void Add(int layer, std::span<const uint16_t> picks);
  void EndStep();
  void Plan(std::vector<Migration>* migrations);
  void Finish(const Migration& migration);
  void Cancel(const Migration& migration) { planner_.Cancel(migration); }

  const ResidencyPlanner& planner() const { return planner_; }
  // The long window: what is worth keeping over a restart.
  const ExpertCounts& counts() const { return windows_[kLong].counts; }
  ExpertCounts* mutable_counts() { return &windows_[kLong].counts; }

 private:
  static constexpr size_t kLong = 1;

  struct Window {
    Window(const ResidencyPlanner::Options& shape, double half_life_steps);
    void Compare(std::span<const uint16_t> picks, const uint8_t* resident, int layer);
    void Choose(int capacity);
    // In standard deviations of picks that fall to either by chance.
    double Lead() const;

    ExpertCounts counts;
    std::vector<uint8_t> chosen;  // by [layer * experts + expert]
    std::vector<uint32_t> order;  // of Choose
    float choice_only = 0;        // decayed picks
    float resident_only = 0;
  };

  const Options options_;
  ResidencyPlanner planner_;
  std::array<Window, 2> windows_;
  std::vector<uint8_t> resident_;  // by [layer * experts + expert]
};

}  // namespace tandem::gpu
