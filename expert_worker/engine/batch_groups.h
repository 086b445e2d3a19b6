#pragma once

// The picks of a batch grouped by expert: a counting sort, rows in order within an expert. Position
// p of the grouped picks is row rows()[p] of the batch, with routing weight weights()[p]; what it
// gives is added to row targets()[p] of the results.
//
// Deferred picks are a part of their own. But an expert that some rows pick now and others later
// would have its weights read twice: while its picks are few, so that reading is what it costs, the
// immediate part computes them all, and results have as many rows again, for the deferred ones.
//
// Written by one thread, read by all after a barrier. Nothing is allocated after Configure.

#include <cstdint>
#include <span>
#include <vector>

#include "common/shm/expert_batch.h"

namespace tandem::expert {

class BatchGroups {
 public:
  static constexpr uint32_t kSkipped = 0xFFFFFFFF;

  // Picks of an expert up to which its weights' way from memory is what it costs: a core's share of
  // it is some 10 GB/s, 5 to 20 billion weights, of which it multiplies 100 to 300 billion.
  static constexpr uint32_t kSharedPicks = 8;

  // Positions [begin, begin + count).
  struct Group {
    uint32_t expert;
    uint32_t begin;
    uint32_t count;
  };

  // Which of a batch's picks are meant.
  enum class Part : uint8_t { kImmediate, kDeferred };

  // `shared_picks`: an expert with up to so many picks, some of them immediate, is computed at
  // once; 0: deferred picks are never in the immediate part.
  void Configure(uint32_t experts, uint32_t max_rows, uint32_t top_k, uint32_t shared_picks = 0);
  // Ids beyond the experts are skipped, their weights ignored. A batch without `deferred` is
  // immediate as a whole.
  void Assign(const shm::ExpertBatch& batch, Part part);
  void Clear() { group_count_ = picks_ = outputs_ = 0; }

  // Experts in use, ascending.
  std::span<const Group> groups() const { return {groups_.data(), group_count_}; }
  uint32_t picks() const { return picks_; }
  const uint32_t* rows() const { return rows_.data(); }
  const float* weights() const { return weights_.data(); }
  // rows()[p], or the batch's rows + rows()[p] of a deferred pick in the immediate part.
  const uint32_t* targets() const { return targets_.data(); }
  // Rows of the results: those of the batch, or twice as many.
  uint32_t outputs() const { return outputs_; }
  // Of pick `i` of the batch (row * top_k + rank), or kSkipped.
  uint32_t position(size_t i) const { return position_[i]; }

 private:
  void Count(const shm::ExpertBatch& batch);
  bool IsShared(uint32_t expert) const {
    return immediate_[expert] > 0 && all_[expert] <= shared_picks_;
  }
  // Picks of an expert in `part`, once counted.
  uint32_t CountOf(uint32_t expert, Part part) const;
  // Of pick `i`, if it is of `part`; else kSkipped, which is no expert.
  uint32_t ExpertOf(const shm::ExpertBatch& batch, Part part, uint32_t i) const;

  uint32_t experts_ = 0;
  uint32_t shared_picks_ = 0;
  std::vector<uint32_t> all_;        // [experts]
  std::vector<uint32_t> immediate_;  // [experts]
  std::vector<uint32_t> next_;       // [experts]: where the expert's next pick goes
  std::vector<uint32_t> rows_;
  std::vector<uint32_t> targets_;
  std::vector<float> weights_;
  std::vector<uint32_t> position_;
  std::vector<Group> groups_;
  uint32_t group_count_ = 0;
  uint32_t picks_ = 0;
  uint32_t outputs_ = 0;
};

}  // namespace tandem::expert
