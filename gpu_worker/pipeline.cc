#include "gpu_worker/pipeline.h"

#include <span>

#include "common/base/check.h"
#include "gpu_worker/hot_experts/expert_stream.h"

namespace tandem::gpu {
namespace {

RowPlace FromRow(const RowPlace& place, int row) {
  RowPlace out = place;
  out.positions += row;
  out.sequence += row;
  return out;
}

}  // namespace

void Pipeline::Enqueue(const StepInputs& inputs, ExpertLink* link) {
  TANDEM_DCHECK(inputs.lanes >= 1 && inputs.lanes <= kMaxLanes);
  std::array<Lane, kMaxLanes> all{MakeLane(inputs, link, 0), MakeLane(inputs, link, 1)};
  const std::span<Lane> lanes(all.data(), static_cast<size_t>(inputs.lanes));
  const auto layers = static_cast<int>(parts_.spec.layers.size());
  // Up to its first submission a lane keeps the experts idle: the first lane gets there at once.
  const int first_moe = parts_.picks.empty() ? layers - 1 : parts_.picks.front().layer;
  const auto streams = [&](int layer) {
    return inputs.stream != nullptr && parts_.spec.layers[static_cast<size_t>(layer)].moe;
  };
  if (streams(first_moe)) inputs.stream->BeginLayer(0);
  for (Lane& lane : lanes) {
    EnqueueEmbedding(lane, inputs);
    for (int layer = 0; layer <= first_moe; ++layer) NextLayer(lane, layer);
  }
  if (streams(first_moe)) inputs.stream->EndLayer();
  for (int layer = first_moe + 1; layer < layers; ++layer) {
    if (streams(layer)) inputs.stream->BeginLayer(lanes[0].moe_layers);
    for (Lane& lane : lanes) NextLayer(lane, layer);
    if (streams(layer)) inputs.stream->EndLayer();
  }
  for (Lane& lane : lanes) {
    FinishLayer(lane);
    Tap(lane, layers);
  }
}

void Pipeline::NextLayer(Lane& lane, int layer) {
  FinishLayer(lane);
  Tap(lane, layer);
  BeginLayer(lane, layer);
}

Pipeline::Lane Pipeline::MakeLane(const StepInputs& inputs, ExpertLink* link, int index) const {
  const LaneRows& rows = inputs.lane[static_cast<size_t>(index)];
  const size_t stamps = static_cast<size_t>(index) * parts_.picks.size();
  return {.step = {.backend = parts_.backend,
                   .spec = parts_.spec,
                   .act = parts_.act.FromRow(rows.first_row),
                   .rows = rows.rows,
                   .place = FromRow(inputs.place, rows.first_row),
                   .link = link,
                   .lane = index,
                   .limits = inputs.limits,
                   .may_defer =
                       inputs.may_defer == nullptr ? nullptr : inputs.may_defer + rows.first_row,
                   .residents = inputs.residents.experts,
                   .stream = inputs.stream},
          .first_row = rows.first_row,
          .slot_of_expert = inputs.residents.slot_of_expert,
          .stamps = inputs.stamps == nullptr ? nullptr : inputs.stamps + stamps,
          .traced = inputs.traced};
}

void Pipeline::EnqueueEmbedding(const Lane& lane, const StepInputs& inputs) {
  const StepContext& step = lane.step;
  step.backend.Embed({.rows = step.rows,
                      .table = parts_.weights.embedding,
                      .ids = inputs.ids + lane.first_row,
                      .out = step.act.hidden});
  step.backend.RopeAngles({.rows = step.rows,
                           .positions = step.place.positions,
                           .inv_freq = parts_.weights.inv_freq,
                           .half = parts_.spec.rope.rotary_dims / 2,
                           .factor = parts_.spec.rope.attention_factor,
                           .out = step.act.angles});
}

void Pipeline::BeginLayer(Lane& lane, int layer) {
  const StepContext& step = lane.step;
  const int moe_layer = parts_.spec.layers[static_cast<size_t>(layer)].moe ? lane.moe_layers++ : -1;
  const LayerWeights& weights = parts_.weights.layers[static_cast<size_t>(layer)];
  LayerStamps* stamps = lane.stamps == nullptr || moe_layer < 0 ? nullptr : lane.stamps + moe_layer;
  if (stamps != nullptr) step.backend.Stamp(&stamps->begin);
  EnqueueNorm(step, step.act.hidden, weights.input_norm, step.act.normed);
  if (parts_.spec.attention.kind == AttentionKind::kMla) {
    EnqueueLatentAttention(step, weights.attention, parts_.cache.layer(layer));
  } else {
    EnqueueGqaAttention(step, weights.attention, parts_.cache.layer(layer));
  }
  if (stamps != nullptr && lane.traced) step.backend.Stamp(&stamps->attended);
  progress_.fetch_add(1, std::memory_order_relaxed);
  EnqueueNorm(step, step.act.hidden, weights.post_attention_norm, step.act.normed);
  if (moe_layer < 0) {
    EnqueueDenseMlp(step, weights.mlp);
  } else {
    RouterPicks picks =
        parts_.picks[static_cast<size_t>(moe_layer)].FromRow(lane.first_row, parts_.spec.moe.top_k);
    if (lane.slot_of_expert != nullptr) {
      picks.slot_of_expert = lane.slot_of_expert + moe_layer * parts_.spec.moe.experts;
    }
    EnqueueMoeBegin(step, weights, picks, stamps);
    lane.open = moe_layer;
  }
  progress_.fetch_add(1, std::memory_order_relaxed);
}

void Pipeline::FinishLayer(Lane& lane) {
  if (lane.open < 0) return;
  EnqueueMoeEnd(lane.step, parts_.picks[static_cast<size_t>(lane.open)],
                lane.stamps == nullptr ? nullptr : lane.stamps + lane.open);
  lane.open = -1;
  progress_.fetch_add(1, std::memory_order_relaxed);
}

void Pipeline::Tap(const Lane& lane, int layer) {
  if (tap_ == nullptr) return;
  tap_->OnHidden(layer, lane.first_row, lane.step.rows, lane.step.act.hidden);
}

}  // namespace tandem::gpu
