#include <chrono>

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

// Adds the wall time of its own life to `total_ns`. Means something only where ops run as they are
// enqueued (the CPU backend).
class ScopedNs {
 public:
  explicit ScopedNs(int64_t& total_ns) : total_ns_(total_ns) {}
  ~ScopedNs() {
    total_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  int64_t& total_ns_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

void EnqueueDenseMlp(const StepContext& step, const MlpWeights& weights) {
  EnqueueSwiglu(step, weights);
}

void EnqueueMoe(const StepContext& step, const LayerWeights& weights, const RouterPicks& picks,
                int64_t& expert_wait_ns) {
  EnqueueRouter(step, weights, picks);
  {
    const ScopedNs timer(expert_wait_ns);
    step.backend.ExpertSubmit({.rows = step.rows,
                               .link = step.link,
                               .lane = step.lane,
                               .layer = picks.layer,
                               .x = step.act.normed,
                               .ids = picks.ids,
                               .weights = picks.weights});
  }
  if (weights.mlp.intermediate > 0) EnqueueSwiglu(step, weights.mlp);
  const ScopedNs timer(expert_wait_ns);
  step.backend.ExpertWait({.rows = step.rows,
                           .link = step.link,
                           .lane = step.lane,
                           .layer = picks.layer,
                           .out = step.act.hidden});
}

}  // namespace tandem::gpu
