#pragma once

// The blocks of a decoder layer as sequences of backend ops. Each reads Activations::normed of its
// lane and adds its result to Activations::hidden. Formulas: notes/models.md
// sections 1.3, 1.4, 2.1.
//
// Nothing here reads device memory, so the ops of a layer depend on the model and the bucket only.

#include <cstdint>

#include "common/model/model_spec.h"
#include "gpu_worker/activations.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/model_weights.h"

namespace tandem::gpu {

class ExpertStream;  // gpu_worker/hot_experts/expert_stream.h

// The device's time at the corners of one MoE layer of one lane, ns.
struct LayerStamps {
  int64_t begin = 0;      // of the layer
  int64_t attended = 0;   // attention is done; of traced steps
  int64_t submit = 0;     // rows are routed
  int64_t submitted = 0;  // handed to the experts
  int64_t shared = 0;     // shared and resident experts are done
  int64_t wait = 0;       // nothing is left to do but wait for the experts
  int64_t done = 0;       // the experts' sum is added
};

// The same of a whole traced step. What a step does not sample is not stamped.
struct StepStamps {
  int64_t begin = 0;    // of the embedding
  int64_t layers = 0;   // all layers are done
  int64_t head = 0;     // logits are there
  int64_t sampled = 0;  // tokens are there
  int64_t end = 0;      // log-probabilities are there
};

// What all ops of one lane of a step share.
struct StepContext {
  Backend& backend;
  const ModelSpec& spec;
  Activations act;
  Rows rows;
  RowPlace place;
  ExpertLink* link = nullptr;
  int lane = 0;
  const DeferralLimits* limits = nullptr;  // device; null: no pick is deferred
  const uint8_t* may_defer = nullptr;      // device [rows]
  ResidentExperts* residents = nullptr;    // null: no expert is ever resident
  ExpertStream* stream = nullptr;          // null: the step streams no experts
};

void EnqueueLinear(const StepContext& step, const LinearLayer& layer, ConstMatrix x, Matrix y);
void EnqueueNorm(const StepContext& step, ConstMatrix x, const float* weight, Matrix out);

void EnqueueGqaAttention(const StepContext& step, const AttentionWeights& weights,
                         const PagedCache& cache);
void EnqueueLatentAttention(const StepContext& step, const AttentionWeights& weights,
                            const PagedCache& cache);

void EnqueueDenseMlp(const StepContext& step, const MlpWeights& weights);

// A MoE block in two parts, between which other work may be enqueued: routing, handing the rows to
// the experts, the shared expert where there is one, the resident ones; then waiting for the
// experts. `stamps` is device memory, or null where nothing is measured; its `begin` is the
// caller's.
void EnqueueMoeBegin(const StepContext& step, const LayerWeights& weights, const RouterPicks& picks,
                     LayerStamps* stamps);
void EnqueueMoeEnd(const StepContext& step, const RouterPicks& picks, LayerStamps* stamps);

}  // namespace tandem::gpu
