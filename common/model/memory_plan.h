#pragma once

// The host memory budget of a deployment, computed before anything is loaded: weights of the gpu
// worker (on the CPU backend), routed experts by worker, key/value cache, links. What does not fit
// is refused with the budget shown.
//
// Pure functions apart from MeasureWeights, which looks at tensor headers only. Units: bytes.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/host_memory.h"
#include "common/model/model_spec.h"
#include "common/tensor/dtype.h"

namespace tandem {

// Weights as they lie in memory after loading: BF16 stays BF16, all else counts as F32. For experts
// that are kept in a quantized format that is an upper bound.
struct WeightBytes {
  uint64_t dense = 0;  // all but routed experts: embeddings, attention, dense and shared MLPs, head
  uint64_t routed = 0;  // all routed experts
};

// REQUIRES: CheckTensors(checkpoint, spec) was OK.
WeightBytes MeasureWeights(const Checkpoint& checkpoint, const ModelSpec& spec);

// Bytes that one token keeps in all layers. GQA: keys and values; MLA: the latent and its RoPE
// part.
uint64_t KvBytesPerToken(const ModelSpec& spec, DType dtype);

struct PlanRequest {
  WeightBytes weights;
  // Each expert worker's part of every expert; sums to 1. Empty where there is no expert worker.
  std::vector<double> worker_shares = {1.0};
  uint64_t kv_bytes_per_token = 0;
  int64_t kv_tokens = 0;
  uint64_t link_bytes_per_worker = 0;  // shm::ComputeLayout(...).segment_bytes
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
