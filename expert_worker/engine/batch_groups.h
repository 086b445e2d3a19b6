#pragma once

// The picks of a batch grouped by expert: a counting sort, rows in order within an expert. Position
// p of the grouped picks is row rows()[p] of the batch, with routing weight weights()[p].
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

  // Positions [begin, begin + count).
  struct Group {
    uint32_t expert;
    uint32_t begin;
    uint32_t count;
  };

  // Which of a batch's picks are meant.
  enum class Part : uint8_t { kImmediate, kDeferred };

  void Configure(uint32_t experts, uint32_t max_rows, uint32_t top_k);
  // Ids beyond the experts are skipped, their weights ignored. A batch without `deferred` is
  // immediate as a whole.
  void Assign(const shm::ExpertBatch& batch, Part part);
  void Clear() { group_count_ = picks_ = 0; }

  // Experts in use, ascending.
  std::span<const Group> groups() const { return {groups_.data(), group_count_}; }
  uint32_t picks() const { return picks_; }
  const uint32_t* rows() const { return rows_.data(); }
  const float* weights() const { return weights_.data(); }
  // Of pick `i` of the batch (row * top_k + rank), or kSkipped.
  uint32_t position(size_t i) const { return position_[i]; }

 private:
  // Of pick `i`, if it is of `part`; else kSkipped, which is no expert.
  static uint32_t ExpertOf(const shm::ExpertBatch& batch, Part part, uint32_t i);

  uint32_t experts_ = 0;
  std::vector<uint32_t> counts_;
  std::vector<uint32_t> rows_;
  std::vector<float> weights_;
  std::vector<uint32_t> position_;
  std::vector<Group> groups_;
  uint32_t group_count_ = 0;
  uint32_t picks_ = 0;
};

}  // namespace tandem::expert
