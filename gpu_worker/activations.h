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
// sentinel in it names a row whose numbers are not finite.
struct RouterPicks {
  int layer = 0;
  uint16_t* ids = nullptr;   // [rows, top_k]
  float* weights = nullptr;  // [rows, top_k]
};

struct Activations {
  static absl::StatusOr<Activations> Create(Backend& backend, const ModelSpec& spec, int max_rows,
                                            int head_rows);

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
  std::vector<RouterPicks> picks;  // one a MoE layer, in layer order
  // Head: [head_rows, ...]
  Matrix head_hidden;
  Matrix logits;

  uint64_t bytes = 0;
};

}  // namespace tandem::gpu
