#include "gpu_worker/inprocess_experts.h"

#include <utility>

#include "common/base/status.h"
#include "common/hw/pages.h"
#include "common/model/expert_tensors.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/expert_source.h"
#include "expert_worker/engine/model_experts.h"
#include "gpu_worker/link_limits.h"
#include "gpu_worker/links/expert_link_set.h"
#include "gpu_worker/links/inprocess_expert_link.h"

namespace tandem::gpu {
absl::StatusOr<InProcessExperts::Engine> InProcessExperts::MakeEngine(
    const Checkpoint& checkpoint, const ModelSpec& spec, const InProcessExpertsOptions& options,
    size_t index, expert::LoadProgress& progress) {
  ASSIGN_OR_RETURN(const ExpertTensors tensors, ExpertTensors::Create(checkpoint, spec));
  ASSIGN_OR_RETURN(const expert::StoreSpec store_spec,
                   expert::MakeStoreSpec(checkpoint, spec, tensors, options.shares,
                                         static_cast<uint32_t>(index)));
  ASSIGN_OR_RETURN(const Memfd memfd, CreateMemfd("tandem-experts", 0, HugePages::kOff));
  const shm::UniqueFd fd(memfd.fd);  // the store's mapping outlives it
  Engine engine;
  engine.spec = store_spec;
  ASSIGN_OR_RETURN(engine.store, expert::WeightStore::Build(
                                     fd.get(), store_spec, expert::CheckpointExperts(&tensors),
                                     {.threads = options.threads}, &progress));
  engine.experts = std::make_unique<expert::RoutedExperts>(
      engine.store.get(), options.kernels,
      expert::RoutedExperts::Options{.threads = options.threads});
  return engine;
}

absl::StatusOr<std::unique_ptr<InProcessExperts>> InProcessExperts::Create(
    const Checkpoint& checkpoint, const ModelSpec& spec, const InProcessExpertsOptions& options,
    expert::LoadProgress& progress) {
  std::unique_ptr<InProcessExperts> out(new InProcessExperts());
  std::vector<std::unique_ptr<ExpertLink>> links;
  for (size_t i = 0; i < options.shares.size(); ++i) {
    ASSIGN_OR_RETURN(out->engines_.emplace_back(),
                     MakeEngine(checkpoint, spec, options, i, progress));
    ASSIGN_OR_RETURN(
        links.emplace_back(),
        MakeInProcessExpertLink({.limits = LinkLimits(spec, options.max_rows, options.row_type),
                                 .threads = options.threads},
                                out->engines_.back().experts.get()));
  }
  if (links.empty()) return absl::InvalidArgumentError("at least one expert share is needed");
  if (links.size() == 1) {
    out->link_ = std::move(links[0]);
  } else {
    out->link_ = std::make_unique<ExpertLinkSet>(std::move(links));
  }
  return out;
}

std::unique_ptr<StoreExperts> InProcessExperts::MakeWeightSource() const {
  std::vector<expert::StoreSpec> specs;
  for (const Engine& engine : engines_) specs.push_back(engine.spec);
  auto source = std::make_unique<StoreExperts>(std::move(specs));
  for (size_t i = 0; i < engines_.size(); ++i) {
    // Owned here, not by the source.
    source->Set(i, {std::shared_ptr<void>(), engines_[i].store.get()});
  }
  return source;
}

}  // namespace tandem::gpu
