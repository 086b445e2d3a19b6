#include "gpu_worker/layers.h"

namespace tandem::gpu {
namespace {

void EnqueueRope(const StepContext& step, Matrix x, int heads, int64_t head_stride,
                 int64_t offset) {
  const RopeSpec& rope = step.spec.rope;
  step.backend.Rope({.rows = step.rows,
                     .x = x,
                     .heads = heads,
                     .head_stride = head_stride,
                     .offset = offset,
                     .half = rope.rotary_dims / 2,
                     .interleaved = rope.layout == RopeLayout::kInterleaved,
                     .angles = step.act.angles});
}

void EnqueueOutput(const StepContext& step, const AttentionWeights& weights) {
  EnqueueLinear(step, weights.o, step.act.context, step.act.block);
  step.backend.Add(
      {.rows = step.rows, .x = step.act.hidden, .y = step.act.block, .width = step.spec.hidden});
}

void EnqueueHeadNorm(const StepContext& step, Matrix x, const float* weight, int heads) {
  step.backend.RmsNorm({.rows = step.rows,
                        .x = x,
                        .out = x,
                        .weight = weight,
                        .width = step.spec.attention.head_dim,
                        .groups = heads,
                        .eps = step.spec.norm_eps});
}

void EnqueueHeads(const StepContext& step, const std::vector<std::unique_ptr<LinearWeight>>& w,
                  ConstMatrix x, int64_t x_head_stride, Matrix y, int64_t y_head_stride) {
  step.backend.HeadLinear({.rows = step.rows,
                           .weights = w.data(),
                           .heads = static_cast<int>(w.size()),
                           .x = x,
                           .x_head_stride = x_head_stride,
                           .y = y,
                           .y_head_stride = y_head_stride});
}

void EnqueueLatentQuery(const StepContext& step, const AttentionWeights& weights) {
  const Activations& act = step.act;
  const AttentionSpec& a = step.spec.attention;
  if (a.q_lora_rank == 0) {
    EnqueueLinear(step, weights.q, act.normed, act.q);
    return;
  }
  EnqueueLinear(step, weights.q_a, act.normed, act.q_a);
  step.backend.RmsNorm({.rows = step.rows,
                        .x = act.q_a,
                        .out = act.q_a,
                        .weight = weights.q_a_norm,
                        .width = a.q_lora_rank,
                        .eps = a.latent_eps});
  EnqueueLinear(step, weights.q_b, act.q_a, act.q);
}

}  // namespace

void EnqueueLinear(const StepContext& step, const LinearLayer& layer, ConstMatrix x, Matrix y) {
  step.backend.Linear(
      {.rows = step.rows, .weight = layer.weight.get(), .bias = layer.bias, .x = x, .y = y});
}

void EnqueueNorm(const StepContext& step, ConstMatrix x, const float* weight, Matrix out) {
  step.backend.RmsNorm({.rows = step.rows,
                        .x = x,
                        .out = out,
                        .weight = weight,
                        .width = step.spec.hidden,
                        .eps = step.spec.norm_eps});
}

void EnqueueGqaAttention(const StepContext& step, const AttentionWeights& weights,
                         const PagedCache& cache) {
  const Activations& act = step.act;
  const AttentionSpec& a = step.spec.attention;
  EnqueueLinear(step, weights.q, act.normed, act.q);
  EnqueueLinear(step, weights.k, act.normed, act.k);
  EnqueueLinear(step, weights.v, act.normed, act.v);
  if (a.qk_norm) {
    EnqueueHeadNorm(step, act.q, weights.q_norm, a.heads);
    EnqueueHeadNorm(step, act.k, weights.k_norm, a.kv_heads);
  }
  EnqueueRope(step, act.q, a.heads, a.head_dim, 0);
  EnqueueRope(step, act.k, a.kv_heads, a.head_dim, 0);
  step.backend.CacheWrite(
      {.rows = step.rows, .place = step.place, .k = act.k, .v = act.v, .cache = cache});
  step.backend.Attention({.rows = step.rows,
                          .place = step.place,
                          .cache = cache,
                          .q = act.q,
                          .out = act.context,
                          .heads = a.heads,
                          .kv_heads = a.kv_heads,
                          .head_dim = a.head_dim,
                          .scale = a.softmax_scale,
                          .window_tokens = a.window_tokens});
  EnqueueOutput(step, weights);
}

void EnqueueLatentAttention(const StepContext& step, const AttentionWeights& weights,
                            const PagedCache& cache) {
  const Activations& act = step.act;
  const AttentionSpec& a = step.spec.attention;
  const int64_t q_stride = a.nope_dim + a.rope_dim;
  EnqueueLatentQuery(step, weights);
  EnqueueLinear(step, weights.kv_a, act.normed, act.kv);
  step.backend.RmsNorm({.rows = step.rows,
                        .x = act.kv,
                        .out = act.kv,
                        .weight = weights.kv_a_norm,
                        .width = a.kv_lora_rank,
                        .eps = a.latent_eps});
  EnqueueRope(step, act.q, a.heads, q_stride, a.nope_dim);
  EnqueueRope(step, act.kv, 1, act.kv.ld, a.kv_lora_rank);
  step.backend.CacheWrite(
      {.rows = step.rows, .place = step.place, .k = act.kv, .v = {}, .cache = cache});
  EnqueueHeads(step, weights.u_transposed, act.q, q_stride, act.q_latent, a.kv_lora_rank);
  step.backend.LatentAttention({.rows = step.rows,
                                .place = step.place,
                                .cache = cache,
                                .q_latent = act.q_latent,
                                .q_rope = {act.q.data + a.nope_dim, act.q.ld},
                                .q_rope_head_stride = q_stride,
                                .out = act.context_latent,
                                .heads = a.heads,
                                .latent_dim = a.kv_lora_rank,
                                .rope_dim = a.rope_dim,
                                .scale = a.softmax_scale});
  EnqueueHeads(step, weights.v_heads, act.context_latent, a.kv_lora_rank, act.context, a.v_dim);
  EnqueueOutput(step, weights);
}

}  // namespace tandem::gpu
