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
  groups_.Configure(m.experts, limits.max_rows, limits.top_k);
  limits_ = limits;
  return absl::OkStatus();
}

void RoutedExperts::Run(const shm::ExpertBatch& batch, int thread, int threads) {
  TANDEM_DCHECK(threads == context_.threads);
  TANDEM_DCHECK(batch.rows <= limits_.max_rows && batch.top_k <= limits_.top_k);
  TANDEM_DCHECK(batch.row_type == limits_.row_type);
  if (limits_.row_type == shm::RowType::kF32) {
    RunBlock(parity_, batch, thread);
  } else {
    RunBlock(fast_, batch, thread);
  }
}

void RoutedExperts::GroupPicks(const shm::ExpertBatch& batch) {
  if (store_->segments() == 0 || !store_->has_layer(batch.layer)) {
    groups_.Clear();
  } else {
    groups_.Assign(batch);
  }
}

template <typename Block>
void RoutedExperts::RunBlock(Block& block, const shm::ExpertBatch& batch, int thread) {
  if (batch.rows == 0) return;
  if (thread == 0) {
    GroupPicks(batch);
    block.Begin(batch);
  }
  block.Prepare(batch, thread);
  context_.Wait();
  if (groups_.picks() == 0) {
    ZeroRows(batch, thread, context_.threads);
    return;
  }
  block.Run(batch, thread);
}

}  // namespace tandem::expert
