#pragma once

// The least time a routed-expert block can take on this machine: what its weights take to read, or
// what its multiply-adds take at the peak of the instruction that the kernels use. Pure functions.

#include <cstdint>

#include "expert_worker/kernels/kernel_table.h"
#include "tests/bench/peak_probes.h"

namespace tandem::bench {

// The instruction that does the multiply-adds of `table`'s kernel for a format; null for the scalar
// table, which has no peak. `exact` means the parity kernel.
const PeakProbe* InstructionOf(const kernels::KernelTable& table, WeightFormat format, bool exact);

struct RoofInput {
  double bytes = 0;  // of the distinct experts
  double bandwidth_gbps = 0;
  double operations = 0;
  double peak_gops = 0;  // 0: unknown, the roof is the memory's
};

struct Roof {
  double seconds = 0;
  bool memory_bound = true;
};

Roof RoofOf(const RoofInput& input);

}  // namespace tandem::bench
