#pragma once

// All weights of a model that the gpu worker computes with (everything but routed experts), in a
// backend's memory: linears in the backend's own layout, norms and biases as F32, the embedding as
// BF16 or F32. MLA's kv_b is cut into one U_h^T [kv_lora, nope] and one V_h [v, kv_lora] a head
// (notes/models.md 2.1), so that attention runs on the cached latent.
//
// Thread safety: immutable once loaded. Ownership: the backend owns all memory and must outlive
// this; the checkpoint is not referenced after loading. Errors: a missing, misshapen or non-finite
// tensor, naming file and tensor; RESOURCE_EXHAUSTED when memory runs out.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model_spec.h"
#include "gpu_worker/backend.h"

namespace tandem::gpu {

struct LinearLayer {
  std::unique_ptr<LinearWeight> weight;  // null: the model has no such linear
  const float* bias = nullptr;
};

struct AttentionWeights {
  // GQA; `q` also for MLA without q_lora
  LinearLayer q, k, v;
  const float* q_norm = nullptr;  // [head_dim]
  const float* k_norm = nullptr;
  // MLA
  LinearLayer q_a, q_b, kv_a;
  const float* q_a_norm = nullptr;
  const float* kv_a_norm = nullptr;
  std::vector<std::unique_ptr<LinearWeight>> u_transposed;  // a head: [kv_lora, nope]
  std::vector<std::unique_ptr<LinearWeight>> v_heads;       // a head: [v, kv_lora]
  LinearLayer o;
};

struct MlpWeights {
  LinearLayer gate, up, down;
  int64_t intermediate = 0;  // 0: absent
};

struct LayerWeights {
  const float* input_norm = nullptr;           // [hidden]
  const float* post_attention_norm = nullptr;  // [hidden]
  AttentionWeights attention;
  MlpWeights mlp;      // dense MLP, or the shared expert
  LinearLayer router;  // MoE layers
  const float* selection_bias = nullptr;
};

struct ModelWeights {
  TensorView embedding;
  std::vector<LayerWeights> layers;
  const float* final_norm = nullptr;
  LinearLayer head;
  const float* inv_freq = nullptr;  // [rotary_dims / 2]
};

// Bytes in the checkpoint of all tensors that LoadModelWeights reads.
uint64_t DenseBytes(const Checkpoint& checkpoint, const ModelSpec& spec);

// `progress` is called after each tensor with the checkpoint bytes read so far, in this thread; its
// error ends the load.
absl::StatusOr<ModelWeights> LoadModelWeights(
    const Checkpoint& checkpoint, const ModelSpec& spec, Backend& backend,
    const std::function<absl::Status(uint64_t)>& progress);

}  // namespace tandem::gpu
