#pragma once

// The least time that a step's dependency graph allows on a simulated machine, from what its ops
// and submissions were charged, not from when they ran. The graph: a lane's ops are a chain
//
//   head, then a layer: pre -> submit -> post -> wait -> the next layer ..., then tail
//
// where `wait` also needs the answer to `submit`, which needs the experts: immediate part, answer,
// deferred part, one submission at a time. The device's stream and the team of experts each do one
// thing at a time. The bound is the largest of
//   - the longest path of each lane, as if it were alone,
//   - the device's work,
//   - the experts' work between the shortest way to the first submission and from the last answer.
// One lane alone reaches it; what two lanes can reach may lie a little above.
//
// Time stamps are left out: they measure the step and are no part of it.
//
// Pure functions. Times in nanoseconds.

#include <cstdint>
#include <vector>

#include "gpu_worker/backend_sim/sim_device.h"

namespace tandem::bench {

struct LayerCost {
  int64_t pre_ns = 0;  // from the previous layer's wait, submission included
  int64_t post_ns = 0;
  int64_t wait_ns = 0;  // bringing the answer over
  int64_t immediate_ns = 0;
  int64_t deferred_ns = 0;
};

struct StepCosts {
  int64_t head_ns = 0;  // before the first op of a lane
  int64_t tail_ns = 0;  // after the last wait
  std::vector<std::vector<LayerCost>> lanes;
  int64_t latency_ns = 0;  // of a flag, each way
};

// REQUIRES: the records of one step.
StepCosts CostsOf(const gpu::SimLog::Records& records, int64_t latency_ns);

int64_t DeviceNs(const StepCosts& costs);   // the stream's work
int64_t LayersNs(const StepCosts& costs);   // of it that of the MoE layers, and what leads to them
int64_t ExpertsNs(const StepCosts& costs);  // the experts' work
int64_t BoundNs(const StepCosts& costs);

}  // namespace tandem::bench
