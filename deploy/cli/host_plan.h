#pragma once

// What a model needs of this host under the given options: resolves the sizes that the options
// leave open (context, KV cache) and sets up the memory budget.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/memory_plan.h"
#include "common/model/model_spec.h"
#include "deploy/cli/serve_options.h"

namespace tandem {

struct HostPlan {
  int max_context = 0;
  int64_t kv_cache_tokens = 0;
  // Packed experts that each expert worker keeps in memory.
  std::vector<uint64_t> expert_bytes;
  MemoryPlan memory;
};

// `shares` are the expert workers' relative shares; empty: experts run in the gpu_worker's process.
// Errors: RESOURCE_EXHAUSTED with the budget when it does not fit; INVALID_ARGUMENT for a context
// that is longer than the model's or than the KV cache.
absl::StatusOr<HostPlan> PlanHost(const ServeOptions& options, const ModelSpec& spec,
                                  const Checkpoint& checkpoint, const std::vector<uint32_t>& shares,
                                  const HostMemory& host);

}  // namespace tandem
