#pragma once

// What a decoder-only transformer of a supported family is, as plain data: the meeting point of the
// families (which fill it from a hub config.json) and of the workers (which build the graph and
// load tensors from it). Nothing here knows a family's name. Formulas: notes/models.md section 1.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/checkpoint/quant_scheme.h"

namespace tandem {

enum class RopeLayout : uint8_t {
  kHalf,         // pairs (j, j + r/2)
  kInterleaved,  // pairs (2j, 2j + 1)
};

struct RopeSpec {
  RopeLayout layout = RopeLayout::kHalf;
  int rotary_dims = 0;          // r: dimensions rotated; the rest pass through
  std::vector<float> inv_freq;  // [r / 2], scaling (llama3, YaRN) already applied
  float attention_factor = 1;   // multiplies cos and sin
};

enum class AttentionKind : uint8_t { kGqa, kMla };

struct AttentionSpec {
  AttentionKind kind = AttentionKind::kGqa;
  int heads = 0;
  int kv_heads = 0;      // GQA
  int head_dim = 0;      // GQA
  int q_lora_rank = 0;   // MLA; 0: plain q_proj
  int kv_lora_rank = 0;  // MLA: width of the cached latent
  int nope_dim = 0;      // MLA
  int rope_dim = 0;      // MLA
  int v_dim = 0;         // MLA
  float softmax_scale = 0;
  int window_tokens = 0;     // keys a query sees, itself included; 0: all
  bool qk_norm = false;      // per-head RMSNorm of q and k before RoPE
  float latent_eps = 1e-6f;  // epsilon of q_a_layernorm and kv_a_layernorm
};

enum class RouterScore : uint8_t { kSoftmax, kSigmoid };

struct RouterSpec {
  RouterScore score = RouterScore::kSoftmax;
  bool selection_bias = false;   // e_score_correction_bias: selection only
  int groups = 1;                // n_group
  int groups_kept = 1;           // topk_group
  bool group_score_max = false;  // group score: its maximum (V2) instead of the sum of its two best
  bool renormalize = true;
  float renormalize_eps = 0;
  float factor = 1;
};

struct MoeSpec {
  int experts = 0;
  int top_k = 0;
  int intermediate = 0;
  int shared_intermediate = 0;  // 0: no shared expert
  RouterSpec router;
};

// Names of the tensors of one linear layer; `bias` empty when there is none.
struct LinearNames {
  std::string weight;
  std::string bias;
};

struct AttentionNames {
  // GQA
  LinearNames q, k, v;
  std::string q_norm, k_norm;  // empty: none
  // MLA; `q` is used where q_lora_rank is 0
  LinearNames q_a, q_b, kv_a, kv_b;
  std::string q_a_norm, kv_a_norm;
  LinearNames o;
};

struct MlpNames {
  LinearNames gate, up, down;
};

struct LayerSpec {
  bool moe = false;
  int dense_intermediate = 0;  // width of the dense MLP where !moe
  std::string input_norm, post_attention_norm;
  AttentionNames attention;
  MlpNames mlp;               // dense MLP, or the shared expert of an MoE layer
  std::string router_weight;  // [experts, hidden]
  std::string router_bias;    // selection bias [experts] F32; empty: none
  // Routed experts: "%d" stands for the expert's index.
  std::string expert_gate, expert_up, expert_down;
};

struct ModelSpec {
  std::string model_type;
  int hidden = 0;
  int vocab = 0;
  int max_context = 0;
  float norm_eps = 1e-6f;
  bool tied_embeddings = false;
  AttentionSpec attention;  // the same in every layer
  RopeSpec rope;
  MoeSpec moe;  // the same in every MoE layer; experts = 0 in dense models
  std::vector<LayerSpec> layers;
  std::string embedding, final_norm, head;
  QuantScheme quant;
  std::vector<uint32_t> end_ids;  // union of config.json, generation_config.json (and tokenizer's)
  std::optional<uint32_t> bos_id;
};

}  // namespace tandem
