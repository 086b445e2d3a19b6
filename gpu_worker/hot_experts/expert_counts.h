#pragma once

// How often each routed expert was picked of late: counts that decay by a half-life in steps.
//
// Pure logic: no clock, no I/O. Thread safety: none. Layers are numbered by MoE layer. Nothing is
// allocated after construction.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tandem::gpu {

class ExpertCounts {
 public:
  struct Options {
    int layers = 0;
    int experts = 0;
    double half_life_steps = 64;
  };

  // REQUIRES: all options are positive.
  explicit ExpertCounts(const Options& options);

  // Picks of one layer of the step in progress. Ids beyond the experts (the sentinel) are skipped.
  void Add(int layer, std::span<const uint16_t> picks);
  void EndStep();

  // Decayed picks by [layer * experts + expert], in units of unit().
  std::span<const float> values() const { return values_; }
  float unit() const { return unit_; }
  // Decayed picks.
  float count(int layer, int expert) const;

  uint64_t steps() const { return steps_; }
  int layers() const { return options_.layers; }
  int experts() const { return options_.experts; }

  // Takes the counts of another of the same shape.
  void Assign(const ExpertCounts& other);
  // Takes counts that an earlier process kept, in picks. REQUIRES: layers * experts finite values
  // >= 0.
  void Restore(std::span<const float> picks, uint64_t steps);

 private:
  const Options options_;
  const float growth_;  // of unit_ a step
  std::vector<float> values_;
  float unit_ = 1;  // what a pick of this step adds: grows instead of all counts shrinking
  uint64_t steps_ = 0;
};

}  // namespace tandem::gpu
