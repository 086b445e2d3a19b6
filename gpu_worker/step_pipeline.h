#pragma once

// How one step after the other is pipelined: asks the planner, cuts the rows into lanes, hands the
// deferral limits to the device, and afterwards reads back what the step's stamps and picks tell.
//
//   Choose (after StepPlan::Build)  ->  Upload  ->  Inputs, graph_key (while enqueuing)
//   ->  Download  ->  Synchronize  ->  Observe (of a step that ended well)
//
// Thread safety: none. Ownership: the decoder must outlive it. Nothing is allocated after Create.

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu_worker/decoder.h"
#include "gpu_worker/pipeline_planner.h"
#include "gpu_worker/step_buffers.h"
#include "gpu_worker/step_plan.h"
#include "gpu_worker/step_times.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

// What the operator allows.
struct PipelineOptions {
  PlannerOptions::Mode mode = PlannerOptions::Mode::kAuto;
  DeferralLimits deferral = {};  // none: results are exact
  bool defer_prefill = false;    // for prompt rows too
  int measure_every = 1;         // steps

  bool defers() const { return deferral.max_deferred > 0 && deferral.max_mass > 0; }
};

// Of all steps that ended well.
struct PipelineCounters {
  std::array<uint64_t, kPolicies> steps{};  // by policy
  uint64_t measured_steps = 0;              // those that the layer stalls are of
  uint64_t routed_rows = 0;                 // rows times MoE layers, where picks are split
  uint64_t deferred_picks = 0;
  uint64_t resident_picks = 0;
  double deferred_mass = 0;  // sum of shares over the routed rows
};

class StepPipeline {
 public:
  struct Limits {
    int max_rows = 0;       // of a step
    int max_sequences = 0;  // decode rows of a step
    int top_k = 0;
  };
  // Rows that a step's buffers need: those of the largest step and the gap between two lanes.
  static int BufferRows(const Limits& limits);

  StepPipeline(const PipelineOptions& options, const Limits& limits, const Decoder& decoder);

  // Before the first step, and when the link is another one.
  void set_link(const ExpertLink* link);

  // Whether the steps chosen from now on have all stamps, whatever the planner wants.
  void set_traced(bool traced) { traced_ = traced; }
  bool traced() const { return traced_; }
  void Choose(StepPlan& plan, StepBuffers& buffers);
  void Upload(Backend& backend, const StepBuffers& buffers, const StepPlan& plan) const;
  StepInputs Inputs(const StepBuffers& buffers) const;
  GraphKey graph_key() const;
  void Download(Backend& backend, StepBuffers& buffers, const StepPlan& plan);
  void Observe(const StepPlan& plan, const StepBuffers& buffers, int64_t step_ns);

  // `target_us`: of the step's time; 0: no budget is asked for.
  void Report(uint64_t target_us, worker::v1::StepTiming& timing) const;

  const StepChoice& choice() const { return choice_; }
  const StepTimes& times() const { return times_; }
  const PipelineCounters& counters() const { return counters_; }
  const std::vector<StepMeter::LayerStall>& stalls() const { return meter_.stalls(); }

 private:
  void CountPicks(const StepPlan& plan);
  void LogSwitch();

  const PipelineOptions options_;
  const Limits limits_;
  const Decoder& decoder_;
  const ExpertLink* link_ = nullptr;
  std::unique_ptr<PipelinePlanner> planner_;
  StepMeter meter_;
  StepShape shape_;
  StepChoice choice_;
  std::array<int, kMaxLanes> bounds_{};  // rows of the lanes, at most
  bool graph_ = false;                   // a decode step
  bool traced_ = false;
  StepTimes times_;
  LayerArray<PickSums> sums_;  // [buffer rows] a layer, where picks are split
  PipelineCounters counters_;
};

}  // namespace tandem::gpu
