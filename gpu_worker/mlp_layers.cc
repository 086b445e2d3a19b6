#include "gpu_worker/hot_experts/expert_stream.h"
#include "gpu_worker/layers.h"

namespace tandem::gpu {
namespace {

// hidden += down(silu(gate x) * up x).
void EnqueueSwiglu(const StepContext& step, const MlpWeights& weights) {
  const Activations& act = step.act;
  const Matrix gate{act.gate.data, weights.intermediate};
  const Matrix up{act.up.data, weights.intermediate};
  EnqueueLinear(step, weights.gate, act.normed, gate);
  EnqueueLinear(step, weights.up, act.normed, up);
  step.backend.SiluMul(
      {.rows = step.rows, .gate = gate, .up = up, .out = gate, .width = weights.intermediate});
  EnqueueLinear(step, weights.down, gate, act.block);
  step.backend.Add({.rows = step.rows, .x = act.hidden, .y = act.block, .width = step.spec.hidden});
}

void EnqueueRouter(const StepContext& step, const LayerWeights& weights, const RouterPicks& picks) {
  const RouterSpec& router = step.spec.moe.router;
  EnqueueLinear(step, weights.router, step.act.normed, step.act.router_logits);
  step.backend.Router({.rows = step.rows,
                       .logits = step.act.router_logits,
                       .selection_bias = weights.selection_bias,
                       .experts = step.spec.moe.experts,
                       .top_k = step.spec.moe.top_k,
                       .sigmoid = router.score == RouterScore::kSigmoid,
                       .groups = router.groups,
                       .groups_kept = router.groups_kept,
                       .group_score_max = router.group_score_max,
                       .renormalize = router.renormalize,
                       .renormalize_eps = router.renormalize_eps,
                       .factor = router.factor,
                       .ids = picks.ids,
                       .weights = picks.weights});
}

void EnqueueSplit(const StepContext& step, const RouterPicks& picks) {
  step.backend.SplitPicks({.rows = step.rows,
                           .ids = picks.ids,
                           .weights = picks.weights,
                           .experts = step.spec.moe.experts,
                           .top_k = step.spec.moe.top_k,
                           .slot_of_expert = picks.slot_of_expert,
                           .limits = step.limits,
                           .may_defer = step.may_defer,
                           .worker_ids = picks.worker_ids,
                           .resident_slots = picks.resident_slots,
                           .deferred = picks.deferred,
                           .sums = picks.sums});
}

// Enqueued whoever is resident at the time: a graph does not change with residency.
void EnqueueResidents(const StepContext& step, const RouterPicks& picks) {
  if (step.residents == nullptr) return;
  if (step.stream != nullptr) step.stream->WaitForLayer();
  step.backend.RunResidentExperts({.rows = step.rows,
                                   .experts = step.residents,
                                   .layer = picks.layer,
                                   .x = step.act.normed,
                                   .slots = picks.resident_slots,
                                   .weights = picks.weights,
                                   .out = step.act.hidden});
}

void EnqueueStamp(const StepContext& step, LayerStamps* stamps, int64_t LayerStamps::*field) {
  if (stamps != nullptr) step.backend.Stamp(&(stamps->*field));
}

}  // namespace

void EnqueueDenseMlp(const StepContext& step, const MlpWeights& weights) {
  EnqueueSwiglu(step, weights);
}

void EnqueueMoeBegin(const StepContext& step, const LayerWeights& weights, const RouterPicks& picks,
                     LayerStamps* stamps) {
  EnqueueRouter(step, weights, picks);
  const bool split = picks.worker_ids != nullptr;
  if (split) EnqueueSplit(step, picks);
  EnqueueStamp(step, stamps, &LayerStamps::submit);
  step.backend.ExpertSubmit({.rows = step.rows,
                             .link = step.link,
                             .lane = step.lane,
                             .layer = picks.layer,
                             .x = step.act.normed,
                             .ids = split ? picks.worker_ids : picks.ids,
                             .weights = picks.weights,
                             .deferred = picks.deferred});
  EnqueueStamp(step, stamps, &LayerStamps::submitted);
  if (weights.mlp.intermediate > 0) EnqueueSwiglu(step, weights.mlp);
  EnqueueResidents(step, picks);
  EnqueueStamp(step, stamps, &LayerStamps::shared);
}

void EnqueueMoeEnd(const StepContext& step, const RouterPicks& picks, LayerStamps* stamps) {
  EnqueueStamp(step, stamps, &LayerStamps::wait);
  step.backend.ExpertWait({.rows = step.rows,
                           .link = step.link,
                           .lane = step.lane,
                           .layer = picks.layer,
                           .out = step.act.hidden});
  EnqueueStamp(step, stamps, &LayerStamps::done);
}

}  // namespace tandem::gpu
