#pragma once

// The bounds of an expert link for a model: what it must be able to carry in one submission.

#include "common/model/model_spec.h"
#include "common/shm/expert_batch.h"

namespace tandem::gpu {

// Two: the halves of a ping-pong step (gpu_worker/pipeline.h).
inline constexpr uint32_t kLinkLanes = 2;

inline shm::BatchLimits LinkLimits(const ModelSpec& spec, int max_rows, shm::RowType row_type) {
  return {.max_rows = static_cast<uint32_t>(max_rows),
          .hidden = static_cast<uint32_t>(spec.hidden),
          .top_k = static_cast<uint32_t>(spec.moe.top_k),
          .num_experts = static_cast<uint32_t>(spec.moe.experts),
          .num_layers = static_cast<uint32_t>(spec.layers.size()),
          .lanes = kLinkLanes,
          .row_type = row_type};
}

}  // namespace tandem::gpu
