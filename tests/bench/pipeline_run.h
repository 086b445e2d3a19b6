#pragma once

// One scenario under one policy: loads the small model, drives the real StepRunner with Steps as a
// gateway sends them, and reports each step's wall time, records and stalls.
//
// Errors: those of loading; INTERNAL for a step that failed. Thread safety: one thread.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/bench/pipeline_bound.h"
#include "tests/bench/pipeline_scenarios.h"
#include "tests/gpu_worker/backend_sim/simulated_model.h"

namespace tandem::bench {

enum class PipelinePolicy : uint8_t { kPlain, kDeferral, kPingPong, kBoth, kPlanner };
inline constexpr PipelinePolicy kPipelinePolicies[] = {
    PipelinePolicy::kPlain, PipelinePolicy::kDeferral, PipelinePolicy::kPingPong,
    PipelinePolicy::kBoth, PipelinePolicy::kPlanner};
const char* NameOf(PipelinePolicy policy);

struct PolicyOptions {
  PipelinePolicy policy = PipelinePolicy::kPlain;
  gpu::DeferralLimits deferral;    // where the policy may defer
  int measure_every = 1;           // steps with stamps
  uint64_t hot_experts_bytes = 0;  // of the described device
  bool residents = true;           // false: no expert stays on the device
  bool stream_prompts = false;
  int fixed_streamed = -1;  // experts a layer; -1: the planner's choice
};

struct StepSample {
  double wall_us = 0;     // dilation taken out
  double virtual_us = 0;  // what the timeline says the step took
  StepCosts costs;
  double device_stall_us = 0;   // waiting for answers
  double experts_stall_us = 0;  // between submissions
  const char* chosen = "";      // the step's policy
};

class PipelineRun {
 public:
  // `dir` is the model's (PipelineModels).
  static absl::StatusOr<std::unique_ptr<PipelineRun>> Create(const Scenario& scenario,
                                                             const PolicyOptions& policy,
                                                             const std::string& dir);

  // One decode step of all streams, or one prefill of a new sequence; in virtual time until
  // SetWall.
  absl::StatusOr<StepSample> Step();
  // Virtual steps until the planner has made up its mind; one, where it has nothing to choose.
  absl::Status WarmUp();
  void SetWall(double dilation);
  gpu::GoldenModel& model() { return model_->model(); }

 private:
  explicit PipelineRun(const Scenario& scenario) : scenario_(scenario) {}
  absl::Status Start();
  // The stream's sequence since the last start.
  uint64_t IdOf(int stream) const;
  void AddPrompt(worker::v1::Step& step, int stream, int tokens) const;
  absl::StatusOr<StepSample> Run(const worker::v1::Step& step);

  const Scenario scenario_;
  std::unique_ptr<gpu::SimulatedModel> model_;
  bool plans_ = false;
  int starts_ = 0;
  int steps_ = 0;  // decodes since
};

// The scenario's machine with a device that is to the experts as `device_to_experts`; as it is
// where that is 0.
absl::StatusOr<gpu::SimMachine> MachineOf(const Scenario& scenario, const std::string& dir);

// The fewest experts a token and layer, whatever their mass, with whose deferral a step is as short
// as with more, within 1 % on the virtual clock: what KTransformers' rule of choosing the number
// comes to.
absl::StatusOr<int> DeferredFor(const Scenario& scenario, const std::string& dir);

// A folder of small models with random weights, each written when it is first asked for.
class PipelineModels {
 public:
  explicit PipelineModels(std::string root) : root_(std::move(root)) {}
  absl::StatusOr<std::string> DirOf(const gpu::SimModel& model) const;

 private:
  const std::string root_;
};

}  // namespace tandem::bench
