#include "expert_worker/engine/routed_experts.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"

namespace tandem::expert {

RoutedExperts::RoutedExperts(const WeightStore* store, const kernels::KernelTable* table,
                             const Options& options)
    : store_(store),
      barrier_(options.threads),
      context_{store, table, options.threads, options.spin, &barrier_, &groups_},
      parity_(context_),
      fast_(context_, options.fused_rows) {}

absl::Status RoutedExperts::Configure(const shm::BatchLimits& limits) {
  const StoreManifest& m = store_->manifest();
  if (limits.hidden != m.hidden || limits.num_experts != m.experts ||
      limits.num_layers != m.layers) {
    return absl::FailedPreconditionError(
        absl::StrCat("the link is for hidden ", limits.hidden, ", ", limits.num_experts,
                     " experts, ", limits.num_layers, " layers; the loaded model has ", m.hidden,
                     ", ", m.experts, ", ", m.layers));
  }
  if (limits.top_k == 0 || limits.top_k > m.experts) {
    return absl::FailedPreconditionError(
        absl::StrCat("top_k ", limits.top_k, " of ", m.experts, " experts"));
  }
  const bool exact = limits.row_type == shm::RowType::kF32;
  RETURN_IF_ERROR(exact ? parity_.Configure(limits) : fast_.Configure(limits));
  workspace_bytes_.store(exact ? parity_.workspace_bytes() : fast_.workspace_bytes(),
                         std::memory_order_relaxed);
  RETURN_IF_ERROR(MakeCarries(limits));
  // Parity mode's sums keep the order of the picks.
  groups_.Configure(m.experts, limits.max_rows, limits.top_k,
                    exact ? 0 : BatchGroups::kSharedPicks);
  limits_ = limits;
  return absl::OkStatus();
}

absl::Status RoutedExperts::MakeCarries(const shm::BatchLimits& limits) {
  const size_t floats = size_t{2} * limits.max_rows * limits.hidden;
  // Small pages are touched as they are used: a few rows, or none.
  ASSIGN_OR_RETURN(carry_memory_, PageBuffer::Allocate(2 * limits.lanes * floats * sizeof(float),
                                                       HugePages::kOff));
  carries_.assign(limits.lanes, Carry{});
  auto* sums = static_cast<float*>(carry_memory_.data());
  for (Carry& carry : carries_) {
    carry.sums = std::exchange(sums, sums + floats);
    carry.next_sums = std::exchange(sums, sums + floats);
  }
  return absl::OkStatus();
}

void RoutedExperts::Run(const shm::ExpertBatch& batch, int thread, int threads) {
  TANDEM_DCHECK(threads == context_.threads);
  TANDEM_DCHECK(batch.rows <= limits_.max_rows && batch.top_k <= limits_.top_k);
  TANDEM_DCHECK(batch.row_type == limits_.row_type && batch.lane < limits_.lanes);
  if (limits_.row_type == shm::RowType::kF32) {
    RunBlock(parity_, batch, thread);
  } else {
    RunBlock(fast_, batch, thread);
  }
}

void RoutedExperts::RunDeferred(const shm::ExpertBatch& batch, int thread, int threads) {
  TANDEM_DCHECK(threads == context_.threads && batch.deferred != nullptr);
  if (limits_.row_type == shm::RowType::kF32) {
    RunDeferredBlock(parity_, batch, thread);
  } else {
    RunDeferredBlock(fast_, batch, thread);
  }
}

void RoutedExperts::GroupPicks(const shm::ExpertBatch& batch, BatchGroups::Part part) {
  if (store_->segments() == 0 || !store_->has_layer(batch.layer)) {
    groups_.Clear();
  } else {
    groups_.Assign(batch, part);
  }
}

bool RoutedExperts::IsDue(const Carry& carry, const shm::ExpertBatch& batch) const {
  return carry.full && carry.step == batch.step && carry.epoch == batch.epoch &&
         carry.rows == batch.rows && carry.layer < batch.layer;
}

template <typename Block>
void RoutedExperts::RunBlock(Block& block, const shm::ExpertBatch& batch, int thread) {
  if (batch.rows == 0) return;
  Carry& carry = carries_[batch.lane];
  if (thread == 0) {
    due_ = IsDue(carry, batch) ? carry.carried(batch) : nullptr;
    carry.full = false;
    std::swap(carry.sums, carry.next_sums);
    GroupPicks(batch, BatchGroups::Part::kImmediate);
    shares_ = groups_.outputs() > batch.rows;
    block.Begin(batch);
  }
  block.Prepare(batch, thread);
  context_.Wait();
  shm::ExpertBatch part = batch;
  if (shares_) part.out = carry.sums;
  if (groups_.picks() == 0) {
    ZeroRows(batch, thread, context_.threads);
  } else {
    block.Run(part, thread);
  }
  if (!shares_ && due_ == nullptr) return;
  context_.Wait();
  if (shares_) CopyShare(batch, carry.sums, batch.out, thread);
  if (due_ != nullptr) AddShare(batch, due_, batch.out, thread);
}

// Rows are still in the kernel's form from Run.
template <typename Block>
void RoutedExperts::RunDeferredBlock(Block& block, const shm::ExpertBatch& batch, int thread) {
  if (batch.rows == 0) return;
  Carry& carry = carries_[batch.lane];
  if (thread == 0) {
    GroupPicks(batch, BatchGroups::Part::kDeferred);
    block.Begin(batch);
    carry.full = shares_ || groups_.picks() > 0;
    carry.step = batch.step;
    carry.epoch = batch.epoch;
    carry.layer = batch.layer;
    carry.rows = batch.rows;
  }
  context_.Wait();
  if (groups_.picks() == 0) return;
  shm::ExpertBatch part = batch;
  part.out = shares_ ? carry.sums : carry.carried(batch);
  block.Run(part, thread);
  if (!shares_) return;
  context_.Wait();
  AddShare(batch, carry.sums, carry.carried(batch), thread);
}

void RoutedExperts::AddShare(const shm::ExpertBatch& batch, const float* from, float* to,
                             int thread) const {
  const Share share = ShareOf(batch.rows * batch.hidden, thread, context_.threads);
  context_.table->add_scaled(1.0f, from + share.begin, to + share.begin, share.end - share.begin);
}

void RoutedExperts::CopyShare(const shm::ExpertBatch& batch, const float* from, float* to,
                              int thread) const {
  const Share share = ShareOf(batch.rows * batch.hidden, thread, context_.threads);
  std::memcpy(to + share.begin, from + share.begin, (share.end - share.begin) * sizeof(float));
}

}  // namespace tandem::expert
