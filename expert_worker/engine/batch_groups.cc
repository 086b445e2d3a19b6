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

void BatchGroups::Assign(const shm::ExpertBatch& batch) {
  const uint32_t picks = batch.rows * batch.top_k;
  Clear();
  std::fill(counts_.begin(), counts_.end(), 0);
  for (uint32_t i = 0; i < picks; ++i) {
    if (batch.ids[i] < experts_) ++counts_[batch.ids[i]];
  }
  for (uint32_t e = 0; e < experts_; ++e) {
    const uint32_t count = counts_[e];
    counts_[e] = picks_;  // from here on: where the expert's next pick goes
    if (count == 0) continue;
    groups_[group_count_++] = {e, picks_, count};
    picks_ += count;
  }
  for (uint32_t i = 0; i < picks; ++i) {
    const uint16_t expert = batch.ids[i];
    position_[i] = expert < experts_ ? counts_[expert]++ : kSkipped;
    if (position_[i] == kSkipped) continue;
    rows_[position_[i]] = i / batch.top_k;
    weights_[position_[i]] = batch.weights[i];
  }
}

}  // namespace tandem::expert
