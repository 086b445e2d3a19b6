#include "expert_worker/engine/batch_groups.h"

#include <algorithm>

namespace tandem::expert {
namespace {

bool IsDeferred(const shm::ExpertBatch& batch, uint32_t i) {
  return batch.deferred != nullptr && batch.deferred[i] != 0;
}

}  // namespace

void BatchGroups::Configure(uint32_t experts, uint32_t max_rows, uint32_t top_k,
                            uint32_t shared_picks) {
  const size_t picks = size_t{max_rows} * top_k;
  experts_ = experts;
  shared_picks_ = shared_picks;
  all_.assign(experts, 0);
  immediate_.assign(experts, 0);
  next_.assign(experts, 0);
  rows_.assign(picks, 0);
  targets_.assign(picks, 0);
  weights_.assign(picks, 0.0f);
  position_.assign(picks, kSkipped);
  groups_.assign(experts, Group{});
  Clear();
}

void BatchGroups::Count(const shm::ExpertBatch& batch) {
  std::fill(all_.begin(), all_.end(), 0);
  std::fill(immediate_.begin(), immediate_.end(), 0);
  for (uint32_t i = 0; i < batch.rows * batch.top_k; ++i) {
    const uint32_t expert = batch.ids[i];
    if (expert >= experts_) continue;
    ++all_[expert];
    if (!IsDeferred(batch, i)) ++immediate_[expert];
  }
}

uint32_t BatchGroups::CountOf(uint32_t expert, Part part) const {
  const uint32_t at_once = IsShared(expert) ? all_[expert] : immediate_[expert];
  return part == Part::kImmediate ? at_once : all_[expert] - at_once;
}

uint32_t BatchGroups::ExpertOf(const shm::ExpertBatch& batch, Part part, uint32_t i) const {
  const uint32_t expert = batch.ids[i];
  if (expert >= experts_) return kSkipped;
  const bool at_once = !IsDeferred(batch, i) || IsShared(expert);
  return at_once == (part == Part::kImmediate) ? expert : kSkipped;
}

void BatchGroups::Assign(const shm::ExpertBatch& batch, Part part) {
  Clear();
  Count(batch);
  outputs_ = batch.rows;
  for (uint32_t e = 0; e < experts_; ++e) {
    const uint32_t count = CountOf(e, part);
    next_[e] = picks_;
    if (count == 0) continue;
    groups_[group_count_++] = {e, picks_, count};
    picks_ += count;
  }
  for (uint32_t i = 0; i < batch.rows * batch.top_k; ++i) {
    const uint32_t expert = ExpertOf(batch, part, i);
    position_[i] = expert == kSkipped ? kSkipped : next_[expert]++;
    if (expert == kSkipped) continue;
    const uint32_t row = i / batch.top_k;
    const bool apart = part == Part::kImmediate && IsDeferred(batch, i);
    if (apart) outputs_ = 2 * batch.rows;
    rows_[position_[i]] = row;
    targets_[position_[i]] = apart ? batch.rows + row : row;
    weights_[position_[i]] = batch.weights[i];
  }
}

}  // namespace tandem::expert
