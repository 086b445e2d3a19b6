#pragma once

// Routed experts computed in the gpu worker's own process (`--link=inprocess`): the engine of an
// expert worker behind an in-process link, without a second process. Several shares give several
// engines, each with its part of every expert, summed in order: what N expert workers compute.
//
// Thread safety: as ExpertLink. Ownership: owns stores, engines and links; the kernel table must
// outlive it. Errors: as WeightStore and ExpertTensors.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model_spec.h"
#include "expert_worker/engine/routed_experts.h"
#include "expert_worker/engine/weight_store.h"
#include "gpu_worker/expert_link.h"
#include "gpu_worker/hot_experts/store_experts.h"

namespace tandem::gpu {

struct InProcessExpertsOptions {
  std::vector<uint32_t> shares = {1};
  const kernels::KernelTable* kernels = nullptr;
  int threads = 1;
  int max_rows = 0;
  shm::RowType row_type = shm::RowType::kBf16;
};

class InProcessExperts {
 public:
  // REQUIRES: the model has routed experts.
  static absl::StatusOr<std::unique_ptr<InProcessExperts>> Create(
      const Checkpoint& checkpoint, const ModelSpec& spec, const InProcessExpertsOptions& options,
      expert::LoadProgress& progress);

  ExpertLink* link() const { return link_.get(); }
  // Copies out of the engines' stores. REQUIRES: this object outlives it.
  std::unique_ptr<StoreExperts> MakeWeightSource() const;

 private:
  struct Engine {
    std::unique_ptr<expert::WeightStore> store;
    std::unique_ptr<expert::RoutedExperts> experts;
    expert::StoreSpec spec;
  };
  InProcessExperts() = default;
  static absl::StatusOr<Engine> MakeEngine(const Checkpoint& checkpoint, const ModelSpec& spec,
                                           const InProcessExpertsOptions& options, size_t index,
                                           expert::LoadProgress& progress);

  std::vector<Engine> engines_;
  std::unique_ptr<ExpertLink> link_;  // refers to the engines: destroyed first
};

}  // namespace tandem::gpu
