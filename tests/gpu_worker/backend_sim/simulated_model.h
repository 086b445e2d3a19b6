#pragma once

// A small model behind a StepRunner on a simulated machine: the CPU backend computes its tensors
// and the in-process link its experts, on one thread each; SimBackend and SimExpertLink give them
// the time of the described model. For tests and benches.
//
// Thread safety: one thread.

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "gpu_worker/backend_sim/sim_backend.h"
#include "gpu_worker/backend_sim/sim_device.h"
#include "gpu_worker/backend_sim/sim_expert_link.h"
#include "tests/gpu_worker/golden_model.h"

namespace tandem::gpu {

struct SimulatedOptions {
  SimMachine machine;
  SimShape shape;  // its small model is the directory's
  SimTimeline::Options timeline = {};
  GoldenOptions golden = {};  // threads, wrap and clock are ignored
};

class SimulatedModel {
 public:
  static absl::StatusOr<std::unique_ptr<SimulatedModel>> Load(const std::string& dir,
                                                              const SimulatedOptions& options);

  SimDevice& device() { return *device_; }
  GoldenModel& model() { return *model_; }
  SimBackend& backend() { return *backend_; }
  SimExpertLink& link() { return *link_; }

 private:
  SimulatedModel() = default;

  std::unique_ptr<SimDevice> device_;
  std::unique_ptr<GoldenModel> model_;
  std::unique_ptr<SimExpertLink> link_;
  SimBackend* backend_ = nullptr;  // the model's
};

// The spec of a model directory.
absl::StatusOr<ModelSpec> SpecOf(const std::string& dir);

}  // namespace tandem::gpu
