#pragma once

// What an op of the Backend moves and computes on the described device, at the big model's sizes
// and for the rows and contexts that it really has when it executes: bytes of device memory read
// and written once each (weights in their own format, activations F32, cached keys and values
// BF16), and multiply-adds as two operations.
//
// Pure functions; they read the device scalars of the op's arguments.

#include "gpu_worker/backend.h"
#include "gpu_worker/backend_sim/sim_model.h"

namespace tandem::gpu {

struct OpCost {
  double bytes = 0;
  double flops = 0;
};

OpCost CostOf(const SimShape& shape, const EmbedArgs& args);
OpCost CostOf(const SimShape& shape, const RmsNormArgs& args);
OpCost CostOf(const SimShape& shape, const LinearArgs& args);
OpCost CostOf(const SimShape& shape, const HeadLinearArgs& args);
OpCost CostOf(const SimShape& shape, const RopeAnglesArgs& args);
OpCost CostOf(const SimShape& shape, const RopeArgs& args);
OpCost CostOf(const SimShape& shape, const CacheWriteArgs& args);
OpCost CostOf(const SimShape& shape, const AttentionArgs& args);
OpCost CostOf(const SimShape& shape, const LatentAttentionArgs& args);
OpCost CostOf(const SimShape& shape, const SiluMulArgs& args);
OpCost CostOf(const SimShape& shape, const AddArgs& args);
OpCost CostOf(const SimShape& shape, const RouterArgs& args);
OpCost CostOf(const SimShape& shape, const SplitPicksArgs& args);
// Each expert in use is read once; resident in the format that the workers have.
OpCost CostOf(const SimShape& shape, const ResidentExpertsArgs& args);
OpCost CostOf(const SimShape& shape, const GatherRowsArgs& args);
OpCost CostOf(const SimShape& shape, const SampleArgs& args);
OpCost CostOf(const SimShape& shape, const LogprobsArgs& args);
OpCost CostOf(const SimShape& shape, const BlockCopyArgs& args);

}  // namespace tandem::gpu
