#pragma once

// The buffers that one decoder step works in, allocated once for the largest step: [rows, width]
// each, F32. Their addresses never change, as captured graphs need.
//
// Ownership: memory belongs to the backend. Thread safety: none; used by the thread that enqueues.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/model_spec.h"
#include "gpu_worker/backend.h"

namespace tandem::gpu {

// What the router chose in one MoE layer; kept for every layer until the step's end, because a
// sentinel in `ids` names a row whose numbers are not finite, and for the counts of hot experts.
// [rows, top_k] each; null where picks are not split (SplitPicks), but ids and weights. `ids` and
// `sums`, which the host reads, follow each other from layer to layer: one copy takes them all.
struct RouterPicks {
  int layer = 0;
  uint16_t* ids = nullptr;
  float* weights = nullptr;
  uint16_t* worker_ids = nullptr;
  uint16_t* resident_slots = nullptr;
  uint8_t* deferred = nullptr;  // null in the last MoE layer too: it defers nothing
  PickSums* sums = nullptr;     // [rows]
  // Device [experts] of this layer, for SplitPicks; null: no expert is ever resident.
  const uint16_t* slot_of_expert = nullptr;

  // The picks from `row` on.
  RouterPicks FromRow(int row, int top_k) const;
};

// Which picks are split.
struct SplitOptions {
  bool deferral = false;
  bool residents = false;

  bool any() const { return deferral || residents; }
};

// One a MoE layer, in layer order. Adds what they take to `bytes`.
absl::StatusOr<std::vector<RouterPicks>> MakePicks(Backend& backend, const ModelSpec& spec,
                                                   int max_rows, const SplitOptions& split,
                                                   uint64_t& bytes);

struct Activations {
  static absl::StatusOr<Activations> Create(Backend& backend, const ModelSpec& spec, int max_rows,
                                            int head_rows);
  // The same buffers from `row` on, those of the head apart.
  Activations FromRow(int row) const;

  Matrix hidden;  // the residual stream
  Matrix normed;  // input of the block at hand
  Matrix block;   // output of the block at hand, before it joins the residual stream
  Matrix angles;  // [rows, rotary_dims]
  // Attention
  Matrix q, k, v;
  Matrix context;  // heads' outputs, input of o
  // MLA
  Matrix q_a;
  Matrix kv;  // [latent | rope key]
  Matrix q_latent, context_latent;
  // MLP and MoE
  Matrix gate, up;
  Matrix router_logits;
  // Head: [head_rows, ...]
  Matrix head_hidden;
  Matrix logits;

  uint64_t bytes = 0;
};

}  // namespace tandem::gpu
