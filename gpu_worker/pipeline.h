#pragma once

// The order in which a step's layers are enqueued, so that the device and the expert workers are
// busy at the same time. Everything else about a step is elsewhere: what the ops of a layer are
// (layers.h), how rows are chosen (step_plan.h), which policy a step takes (pipeline_planner.h).
//
// One in-order device stream; `=` device, `#` expert workers, numbers are layers, ~ a stall:
//
//   plain       device  ==attn 0==|sh|~~~~~~~|==attn 1==|sh|~~~~~~~|==attn 2==
//               experts           |### 0 ####|          |### 1 ####|
//
//   deferral    device  ==attn 0==|sh|~~|==attn 1==|sh|~~|==attn 2==   `d` is what of layer 0 may
//               experts           |# 0 #|ddd 0 ddd|# 1 #|ddd 1 ddd|    come with layer 1's sum
//
//   ping-pong   device  =A0=|=B0=|=A1=|=B1=|=A2=|=B2=   halves A and B of the rows, each a lane;
//               experts     |#A0#|#B0#|#A1#|#B1#|#A2#   one computes while the other attends
//
// Deferral changes results within its two limits (backend.h, SplitPicks); ping-pong does not: ops
// are row-independent, and A goes first, so that rows of B may read the keys of rows of A.
//
// Within a lane a layer is BeginLayer (attention, router, submit, shared experts) and FinishLayer
// (wait and add); FinishLayer comes as late as can be: just before the lane's next layer. So with
// one lane nothing lies between them, and with two the other lane's BeginLayer does.
//
// Thread safety and errors: none of its own; the enqueuing thread calls it, ops keep their errors
// until Backend::Synchronize.

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "gpu_worker/backend.h"
#include "gpu_worker/kv_cache.h"
#include "gpu_worker/layers.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::gpu {

inline constexpr int kMaxLanes = 2;

// Sees intermediate results, for tests. Called while a step is enqueued; the callee synchronizes
// before it reads.
class DecoderTap {
 public:
  virtual ~DecoderTap() = default;
  // Of one lane, whose rows are [first_row, first_row + *rows.count) of the step's buffers. `layer`
  // 0 is the embedding, layer n the residual stream after n layers: [rows, hidden].
  virtual void OnHidden(int layer, int first_row, Rows rows, ConstMatrix hidden) = 0;
  // Raw logits of the rows that `indices` (device) names: [*count, vocab].
  virtual void OnLogits(const int32_t* indices, const int32_t* count, ConstMatrix logits) = 0;
};

// The rows of one lane: a range of the step's buffers. How many of them are used is device memory.
struct LaneRows {
  Rows rows;
  int first_row = 0;
};

// What a step computes, in device memory; REQUIRES: lanes do not overlap.
struct StepInputs {
  int lanes = 1;
  std::array<LaneRows, kMaxLanes> lane;
  const int32_t* ids = nullptr;  // [rows]
  RowPlace place;
  const DeferralLimits* limits = nullptr;  // null: the model's picks are not deferred
  const uint8_t* may_defer = nullptr;      // [rows]
  Residents residents;                     // none, or what hot experts are where
  ExpertStream* stream = nullptr;          // null: no experts are streamed
  LayerStamps* stamps = nullptr;           // [kMaxLanes, MoE layers]; null: not measured
  bool traced = false;                     // all stamps are wanted
};

class Pipeline {
 public:
  // All outlive it.
  struct Parts {
    Backend& backend;
    const ModelSpec& spec;
    const ModelWeights& weights;
    const KvCache& cache;
    const Activations& act;
    const std::vector<RouterPicks>& picks;
  };

  explicit Pipeline(const Parts& parts) : parts_(parts) {}

  // Embedding and all layers of all lanes. REQUIRES: `link` is set if the model has experts.
  void Enqueue(const StepInputs& inputs, ExpertLink* link);

  void set_tap(DecoderTap* tap) { tap_ = tap; }
  // Grows while ops are enqueued. Any thread.
  uint64_t progress() const { return progress_.load(std::memory_order_relaxed); }

 private:
  struct Lane {
    StepContext step;
    int first_row = 0;
    const uint16_t* slot_of_expert = nullptr;  // [MoE layers, experts]
    LayerStamps* stamps = nullptr;             // [MoE layers]
    bool traced = false;
    int moe_layers = 0;  // begun
    int open = -1;       // MoE layer (its index in `picks`) that FinishLayer is due for
  };

  Lane MakeLane(const StepInputs& inputs, ExpertLink* link, int index) const;
  void EnqueueEmbedding(const Lane& lane, const StepInputs& inputs);
  void NextLayer(Lane& lane, int layer);
  void BeginLayer(Lane& lane, int layer);
  void FinishLayer(Lane& lane);
  void Tap(const Lane& lane, int layer);

  const Parts parts_;
  DecoderTap* tap_ = nullptr;
  std::atomic<uint64_t> progress_{0};
};

}  // namespace tandem::gpu
