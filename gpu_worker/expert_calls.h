#pragma once

// A backend's two expert ops as calls of their link.

#include "gpu_worker/backend.h"
#include "gpu_worker/expert_link.h"

namespace tandem::gpu {

inline Submission SubmissionOf(const ExpertSubmitArgs& args) {
  return {.lane = static_cast<uint32_t>(args.lane),
          .layer = static_cast<uint32_t>(args.layer),
          .flags = 0,
          .rows = args.rows.count,
          .max_rows = args.rows.bound,
          .x = args.x.data,
          .ids = args.ids,
          .weights = args.weights,
          .deferred = args.deferred};
}

inline Collection CollectionOf(const ExpertWaitArgs& args) {
  return {.lane = static_cast<uint32_t>(args.lane),
          .layer = static_cast<uint32_t>(args.layer),
          .rows = args.rows.count,
          .max_rows = args.rows.bound,
          .out = args.out.data,
          .gather = Gather::kAdd};
}

}  // namespace tandem::gpu
