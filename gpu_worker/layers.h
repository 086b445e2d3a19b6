#pragma once

// The blocks of a decoder layer as sequences of backend ops. Each reads Activations::normed of the
// step and adds its result to Activations::hidden. Formulas: notes/models.md
// sections 1.3, 1.4, 2.1.
//
// Nothing here reads device memory, so the ops of a layer depend on the model and the bucket only.

#include <atomic>
#include <cstdint>

#include "common/model/model_spec.h"
#include "gpu_worker/activations.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/model_weights.h"

namespace tandem::gpu {

// What all ops of one step share.
struct StepContext {
  Backend& backend;
  const ModelSpec& spec;
  const Activations& act;
  Rows rows;
  RowPlace place;
  ExpertLink* link = nullptr;
  int lane = 0;
};

void EnqueueLinear(const StepContext& step, const LinearLayer& layer, ConstMatrix x, Matrix y);
void EnqueueNorm(const StepContext& step, ConstMatrix x, const float* weight, Matrix out);

void EnqueueGqaAttention(const StepContext& step, const AttentionWeights& weights,
                         const PagedCache& cache);
void EnqueueLatentAttention(const StepContext& step, const AttentionWeights& weights,
                            const PagedCache& cache);

void EnqueueDenseMlp(const StepContext& step, const MlpWeights& weights);
// The shared expert, where there is one, runs between handing the rows to the routed experts and
// waiting for them. Adds the time spent in the hand-over to `expert_wait_ns`.
void EnqueueMoe(const StepContext& step, const LayerWeights& weights, const RouterPicks& picks,
                int64_t& expert_wait_ns);

}  // namespace tandem::gpu
