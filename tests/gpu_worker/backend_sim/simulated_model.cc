#include "tests/gpu_worker/backend_sim/simulated_model.h"

#include <utility>

#include "common/base/status.h"
#include "common/model/model_loader.h"

namespace tandem::gpu {

absl::StatusOr<std::unique_ptr<SimulatedModel>> SimulatedModel::Load(
    const std::string& dir, const SimulatedOptions& options) {
  std::unique_ptr<SimulatedModel> out(new SimulatedModel());
  out->device_ = std::make_unique<SimDevice>(options.machine, options.shape, options.timeline);
  GoldenOptions golden = options.golden;
  golden.threads = 1;
  golden.clock = &out->device_->timeline;
  golden.wrap = [&out](CpuBackend& tensors) {
    auto backend = std::make_unique<SimBackend>(*out->device_, tensors);
    out->backend_ = backend.get();
    return backend;
  };
  ASSIGN_OR_RETURN(out->model_, GoldenModel::Load(dir, golden));
  out->link_ = std::make_unique<SimExpertLink>(*out->device_, *out->model_->link());
  out->model_->runner().set_link(out->link_.get());
  return out;
}

absl::StatusOr<ModelSpec> SpecOf(const std::string& dir) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(dir));
  return LoadModelSpec(*checkpoint);
}

}  // namespace tandem::gpu
