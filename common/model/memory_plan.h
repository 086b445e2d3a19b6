#pragma once

// The host memory budget of a deployment, computed before anything is loaded: weights of the gpu
// worker (on the CPU backend), routed experts by worker, key/value cache, links. What does not fit
// is refused with the budget shown.
//
// Pure functions apart from DenseWeightBytes, which looks at tensor headers only. Units: bytes.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/host_memory.h"
#include "common/model/model_spec.h"
#include "common/tensor/dtype.h"

namespace tandem {

// All but the routed experts as they lie in the gpu worker's memory: embeddings, attention, dense
// and shared MLPs, head. BF16 stays BF16, all else becomes F32. How much packed experts take is the
// expert engine's to say (expert_worker/engine/model_experts.h).
// REQUIRES: CheckTensors(checkpoint, spec) was OK.
uint64_t DenseWeightBytes(const Checkpoint& checkpoint, const ModelSpec& spec);

// Bytes that one token keeps in all layers. GQA: keys and values; MLA: the latent and its RoPE
// part.
uint64_t KvBytesPerToken(const ModelSpec& spec, DType dtype);

struct PlanRequest {
  uint64_t dense_bytes = 0;
  // What each expert worker keeps. One entry where the gpu worker computes the experts itself, none
  // for a model without.
  std::vector<uint64_t> expert_bytes;
  uint64_t hot_expert_bytes = 0;  // copies of routed experts beside the dense weights
  uint64_t kv_bytes_per_token = 0;
  int64_t kv_tokens = 0;
  uint64_t link_bytes_per_worker = 0;  // shm::ComputeLayout(...).segment_bytes; 0: no links
  uint64_t other_bytes = 0;            // activations, processes
};

struct MemoryPlan {
  struct Line {
    std::string what;
    uint64_t bytes = 0;
  };
  std::vector<Line> lines;
  uint64_t needed_bytes = 0;
  HostMemory host;

  // RESOURCE_EXHAUSTED, on one line, when `needed_bytes` is above what the host has.
  absl::Status Check() const;
  // The budget as an aligned table, one line an item, needed and available last.
  std::string ToString() const;
};

MemoryPlan MakeMemoryPlan(const PlanRequest& request, const HostMemory& host);

// "6.50 GiB", "512 B".
std::string FormatBytes(uint64_t bytes);

}  // namespace tandem
