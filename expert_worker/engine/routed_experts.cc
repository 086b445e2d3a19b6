#include "expert_worker/engine/routed_experts.h"

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
  groups_.Configure(m.experts, limits.max_rows, limits.top_k);
  limits_ = limits;
  return absl::OkStatus();
}

absl::Status RoutedExperts::MakeCarries(const shm::BatchLimits& limits) {
  const size_t floats = size_t{limits.max_rows} * limits.hidden;
  // Small pages are touched as they are used: a few rows, or none.
  ASSIGN_OR_RETURN(carry_memory_,
                   PageBuffer::Allocate(limits.lanes * floats * sizeof(float), HugePages::kOff));
  carries_.assign(limits.lanes, Carry{});
  for (size_t lane = 0; lane < carries_.size(); ++lane) {
    carries_[lane].sums = static_cast<float*>(carry_memory_.data()) + lane * floats;
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
  if (thread == 0) {
    Carry& carry = carries_[batch.lane];
    carry_due_ = IsDue(carry, batch);
    carry.full = false;
    GroupPicks(batch, BatchGroups::Part::kImmediate);
    block.Begin(batch);
  }
  block.Prepare(batch, thread);
  context_.Wait();
  if (groups_.picks() == 0) {
    ZeroRows(batch, thread, context_.threads);
  } else {
    block.Run(batch, thread);
  }
  if (carry_due_) {
    context_.Wait();
    AddCarry(batch, thread);
  }
}

// Rows are still in the kernel's form from Run.
template <typename Block>
void RoutedExperts::RunDeferredBlock(Block& block, const shm::ExpertBatch& batch, int thread) {
  if (batch.rows == 0) return;
  Carry& carry = carries_[batch.lane];
  shm::ExpertBatch part = batch;
  part.out = carry.sums;
  if (thread == 0) {
    GroupPicks(batch, BatchGroups::Part::kDeferred);
    block.Begin(part);
    carry = {groups_.picks() > 0, batch.step, batch.epoch, batch.layer, batch.rows, carry.sums};
  }
  context_.Wait();
  if (groups_.picks() > 0) block.Run(part, thread);
}

void RoutedExperts::AddCarry(const shm::ExpertBatch& batch, int thread) const {
  const Share share = ShareOf(batch.rows * batch.hidden, thread, context_.threads);
  context_.table->add_scaled(1.0f, carries_[batch.lane].sums + share.begin, batch.out + share.begin,
                             share.end - share.begin);
}

}  // namespace tandem::expert
