#pragma once

// Where a step's time went: the device's stamps and the expert workers' times of every MoE layer,
// summed up. All in ns; device and experts may have clocks of their own, only differences of one
// clock are formed.
//
// Thread safety: none.

#include <array>
#include <cstdint>
#include <vector>

#include "gpu_worker/expert_link.h"
#include "gpu_worker/layers.h"
#include "gpu_worker/pipeline.h"

namespace tandem::gpu {

struct StepTimes {
  struct Lane {
    int64_t device_ns = 0;   // attention, router, shared and resident experts
    int64_t experts_ns = 0;  // of the workers, deferred picks included
  };

  bool measured = false;         // the sums below are of this step
  int64_t step_ns = 0;           // first op to last, as the host saw it
  int64_t before_ns = 0;         // device, before the experts have their rows
  int64_t beside_ns = 0;         // device, while they compute: shared and resident experts
  int64_t handover_ns = 0;       // device, handing rows over
  int64_t device_stall_ns = 0;   // device, waiting for the experts
  int64_t experts_ns = 0;        // workers, what was waited for
  int64_t deferred_ns = 0;       // workers, what was not
  int64_t experts_stall_ns = 0;  // workers, between two layers
  std::array<Lane, kMaxLanes> lane;
};

class StepMeter {
 public:
  // `moe_layers`: the link's numbers of them, ascending.
  explicit StepMeter(std::vector<int> moe_layers);

  // `stamps` is [lanes, MoE layers], the step ended well. Sums up, and adds to the stalls.
  StepTimes Measure(const LayerStamps* stamps, const ExpertLink& link, int lanes);

  // Stall of each MoE layer since the start, over all measured steps.
  struct LayerStall {
    int layer = 0;
    int64_t device_ns = 0;   // waiting for the layer's experts
    int64_t experts_ns = 0;  // waiting for the layer's rows
  };
  const std::vector<LayerStall>& stalls() const { return stalls_; }

 private:
  std::vector<LayerStall> stalls_;
};

}  // namespace tandem::gpu
