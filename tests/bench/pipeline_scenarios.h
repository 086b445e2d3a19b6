#pragma once

// What pipeline_bench runs: machines x models x numbers of streams, and the ratio of device to
// expert time that the KTransformers paper reports. Plain data.

#include <string>
#include <vector>

#include "gpu_worker/backend_sim/sim_machine.h"
#include "gpu_worker/backend_sim/sim_model.h"

namespace tandem::bench {

struct Scenario {
  std::string name;  // machine/model/decode-STREAMS or machine/model/prefill-ROWS
  gpu::SimMachine machine;
  gpu::SimModel model;
  int streams = 1;
  int prefill_rows = 0;    // 0: decode
  int context_tokens = 0;  // that each sequence has when decoding starts
  // The device is made slower or faster until its work is to the experts' as this of plain decode
  // steps; 0: left as described.
  double device_to_experts = 0;
};

std::vector<Scenario> PipelineScenarios();

}  // namespace tandem::bench
