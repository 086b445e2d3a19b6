#include "expert_worker/engine/batch_groups.h"

#include <algorithm>

namespace tandem::expert {

void BatchGroups::Configure(uint32_t experts, uint32_t max_rows, uint32_t top_k) {
  const size_t picks = size_t{max_rows} * top_k;
  experts_ = experts;
  counts_.assign(experts, 0);
  rows_.assign(picks, 0);
  weights_.assign(picks, 0.0f);
  position_.assign(picks, kSkipped);
  groups_.assign(experts, Group{});
  Clear();
}

uint32_t BatchGroups::ExpertOf(const shm::ExpertBatch& batch, Part part, uint32_t i) {
  const bool deferred = batch.deferred != nullptr && batch.deferred[i] != 0;
  return deferred == (part == Part::kDeferred) ? batch.ids[i] : kSkipped;
}

void BatchGroups::Assign(const shm::ExpertBatch& batch, Part part) {
  const uint32_t picks = batch.rows * batch.top_k;
  Clear();
  std::fill(counts_.begin(), counts_.end(), 0);
  for (uint32_t i = 0; i < picks; ++i) {
    const uint32_t expert = ExpertOf(batch, part, i);
    if (expert < experts_) ++counts_[expert];
  }
  for (uint32_t e = 0; e < experts_; ++e) {
    const uint32_t count = counts_[e];
    counts_[e] = picks_;  // from here on: where the expert's next pick goes
    if (count == 0) continue;
    groups_[group_count_++] = {e, picks_, count};
    picks_ += count;
  }
  for (uint32_t i = 0; i < picks; ++i) {
    const uint32_t expert = ExpertOf(batch, part, i);
    position_[i] = expert < experts_ ? counts_[expert]++ : kSkipped;
    if (position_[i] == kSkipped) continue;
    rows_[position_[i]] = i / batch.top_k;
    weights_[position_[i]] = batch.weights[i];
  }
}

}  // namespace tandem::expert
