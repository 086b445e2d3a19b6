#include "gpu_worker/decoder.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "common/base/check.h"
#include "common/base/status.h"

namespace tandem::gpu {

int BucketOf(int rows, int max_rows) {
  const auto bucket = static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::max(rows, 1))));
  return std::min(bucket, max_rows);
}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(Backend& backend, const ModelSpec& spec,
                                                         const ModelWeights& weights,
                                                         const KvCache& cache,
                                                         const DecoderOptions& options) {
  TANDEM_CHECK(options.max_rows > 0 && options.head_rows > 0);
  TANDEM_CHECK(weights.layers.size() == spec.layers.size());
  std::unique_ptr<Decoder> decoder(new Decoder(backend, spec, weights, cache, options));
  ASSIGN_OR_RETURN(decoder->act_,
                   Activations::Create(backend, spec, options.max_rows, options.head_rows));
  return decoder;
}

void Decoder::EnqueueForward(const StepInputs& inputs, int bucket, ExpertLink* link, int lane) {
  TANDEM_DCHECK(bucket <= options_.max_rows);
  const StepContext step{.backend = backend_,
                         .spec = spec_,
                         .act = act_,
                         .rows = {.bound = bucket, .count = inputs.row_count},
                         .place = inputs.place,
                         .link = link,
                         .lane = lane};
  backend_.Embed(
      {.rows = step.rows, .table = weights_.embedding, .ids = inputs.ids, .out = act_.hidden});
  backend_.RopeAngles({.rows = step.rows,
                       .positions = inputs.place.positions,
                       .inv_freq = weights_.inv_freq,
                       .half = spec_.rope.rotary_dims / 2,
                       .factor = spec_.rope.attention_factor,
                       .out = act_.angles});
  if (tap_ != nullptr) tap_->OnHidden(0, act_.hidden);
  auto picks = act_.picks.begin();
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    const bool moe = spec_.layers[i].moe;
    EnqueueLayer(step, static_cast<int>(i), moe ? &*picks : nullptr);
    if (moe) ++picks;
    if (tap_ != nullptr) tap_->OnHidden(static_cast<int>(i) + 1, act_.hidden);
  }
}

void Decoder::EnqueueLayer(const StepContext& step, int index, const RouterPicks* picks) {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(index)];
  EnqueueNorm(step, act_.hidden, weights.input_norm, act_.normed);
  if (spec_.attention.kind == AttentionKind::kMla) {
    EnqueueLatentAttention(step, weights.attention, cache_.layer(index));
  } else {
    EnqueueGqaAttention(step, weights.attention, cache_.layer(index));
  }
  Progress();
  EnqueueNorm(step, act_.hidden, weights.post_attention_norm, act_.normed);
  if (picks != nullptr) {
    EnqueueMoe(step, weights, *picks, expert_wait_ns_);
  } else {
    EnqueueDenseMlp(step, weights.mlp);
  }
  Progress();
}

Matrix Decoder::EnqueueHead(Rows rows, const int32_t* indices) {
  TANDEM_DCHECK(rows.bound <= options_.head_rows);
  backend_.GatherRows({.rows = rows,
                       .x = act_.hidden,
                       .indices = indices,
                       .out = act_.head_hidden,
                       .width = spec_.hidden});
  backend_.RmsNorm({.rows = rows,
                    .x = act_.head_hidden,
                    .out = act_.head_hidden,
                    .weight = weights_.final_norm,
                    .width = spec_.hidden,
                    .eps = spec_.norm_eps});
  backend_.Linear({.rows = rows,
                   .weight = weights_.head.weight.get(),
                   .bias = weights_.head.bias,
                   .x = act_.head_hidden,
                   .y = act_.logits});
  Progress();
  if (tap_ != nullptr) tap_->OnLogits(indices, rows.count, act_.logits);
  return act_.logits;
}

int64_t Decoder::TakeExpertWaitNs() { return std::exchange(expert_wait_ns_, 0); }

}  // namespace tandem::gpu
