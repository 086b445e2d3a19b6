#pragma once

// Where copies of routed experts come from: this process's own store, or those of expert workers.

#include "absl/status/status.h"
#include "common/tensor/expert_weights.h"

namespace tandem::gpu {

class ExpertWeightSource {
 public:
  virtual ~ExpertWeightSource() = default;

  // An expert of a layer of the model, in canonical form; `out` is overwritten, its memory reused.
  // One thread at a time. UNAVAILABLE while a worker that holds a part of it is lost.
  virtual absl::Status Read(int layer, int expert, CanonicalExpert* out) = 0;
};

}  // namespace tandem::gpu
