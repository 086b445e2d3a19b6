#include "gpu_worker/backend_sim/sim_model.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/model/model_loader.h"

namespace tandem::gpu {
namespace {

constexpr std::string_view kQwen3Small = R"({
  "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
  "moe_intermediate_size": 16, "intermediate_size": 80, "vocab_size": 320})";

constexpr std::string_view kQwen3At30 = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
  "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
  "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
  "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": true,
  "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
  "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
  "attention_bias": false, "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1})";

constexpr std::string_view kQwen3At235 = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
  "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
  "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
  "moe_intermediate_size": 1536, "intermediate_size": 12288, "norm_topk_prob": true,
  "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
  "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
  "attention_bias": false, "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1})";

constexpr std::string_view kDeepseekSmall = R"({
  "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48,
  "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
  "moe_intermediate_size": 24, "intermediate_size": 112, "vocab_size": 320})";

constexpr std::string_view kDeepseekV3 = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
  "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
  "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
  "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
  "intermediate_size": 18432, "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8,
  "topk_group": 4, "norm_topk_prob": true, "scoring_func": "sigmoid",
  "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "vocab_size": 129280,
  "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
  "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                   "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
  "attention_bias": false, "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1})";

// INT4 in groups of 32 with a BF16 scale each.
constexpr double kInt4Bytes = 0.5 + 2.0 / 32;

constexpr SimModel kModels[] = {
    {"qwen3-30b-int4", kQwen3At30, kQwen3Small, {.experts = kInt4Bytes, .dense = 2}},
    {"qwen3-30b-bf16", kQwen3At30, kQwen3Small, {.experts = 2, .dense = 2}},
    {"qwen3-235b-int4", kQwen3At235, kQwen3Small, {.experts = kInt4Bytes, .dense = 2}},
    {"deepseek-v3-int4", kDeepseekV3, kDeepseekSmall, {.experts = kInt4Bytes, .dense = 1}},
    {"deepseek-v3-bf16", kDeepseekV3, kDeepseekSmall, {.experts = 2, .dense = 2}},
};

absl::Status AddWidth(int64_t small, int64_t big, SimShape& shape) {
  if (small == 0 && big == 0) return absl::OkStatus();
  auto& widths = shape.widths;
  const auto at = std::lower_bound(widths.begin(), widths.end(), std::pair(small, int64_t{0}));
  if (at != widths.end() && at->first == small) {
    if (at->second == big) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("width ", small, " stands for ", at->second, " and for ", big));
  }
  widths.insert(at, {small, big});
  return absl::OkStatus();
}

absl::Status AddAttention(const AttentionSpec& small, const AttentionSpec& big, SimShape& shape) {
  if (small.kind == AttentionKind::kGqa) {
    RETURN_IF_ERROR(AddWidth(small.head_dim, big.head_dim, shape));
    RETURN_IF_ERROR(AddWidth(small.heads * small.head_dim, big.heads * big.head_dim, shape));
    return AddWidth(small.kv_heads * small.head_dim, big.kv_heads * big.head_dim, shape);
  }
  RETURN_IF_ERROR(AddWidth(small.q_lora_rank, big.q_lora_rank, shape));
  RETURN_IF_ERROR(AddWidth(small.kv_lora_rank, big.kv_lora_rank, shape));
  RETURN_IF_ERROR(
      AddWidth(small.kv_lora_rank + small.rope_dim, big.kv_lora_rank + big.rope_dim, shape));
  RETURN_IF_ERROR(AddWidth(small.nope_dim, big.nope_dim, shape));
  RETURN_IF_ERROR(AddWidth(small.v_dim, big.v_dim, shape));
  RETURN_IF_ERROR(AddWidth(small.heads * (small.nope_dim + small.rope_dim),
                           big.heads * (big.nope_dim + big.rope_dim), shape));
  return AddWidth(small.heads * small.v_dim, big.heads * big.v_dim, shape);
}

absl::Status CheckSameGraph(const ModelSpec& small, const ModelSpec& big) {
  const bool layers =
      std::equal(small.layers.begin(), small.layers.end(), big.layers.begin(), big.layers.end(),
                 [](const LayerSpec& a, const LayerSpec& b) { return a.moe == b.moe; });
  if (!layers || small.attention.kind != big.attention.kind ||
      small.moe.experts != big.moe.experts || small.moe.top_k != big.moe.top_k ||
      (small.moe.shared_intermediate == 0) != (big.moe.shared_intermediate == 0)) {
    return absl::FailedPreconditionError("the computed model is not of the described one's graph");
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const SimModel> SimModels() { return kModels; }

const SimModel* FindSimModel(std::string_view name) {
  const auto* found = std::find_if(std::begin(kModels), std::end(kModels),
                                   [&](const SimModel& m) { return m.name == name; });
  return found == std::end(kModels) ? nullptr : found;
}

nlohmann::json BigConfig(const SimModel& model) {
  nlohmann::json config = nlohmann::json::parse(model.config);
  if (model.layers == 0) return config;
  // With their share of dense layers, which keep the experts idle.
  constexpr const char* kDense = "first_k_dense_replace";
  const int all = config["num_hidden_layers"].get<int>();
  if (config.contains(kDense)) {
    const int dense = config[kDense].get<int>();
    config[kDense] = std::clamp((dense * model.layers + all / 2) / all, std::min(dense, 1), dense);
  }
  config["num_hidden_layers"] = model.layers;
  return config;
}

nlohmann::json SmallConfig(const SimModel& model) {
  nlohmann::json config = BigConfig(model);
  config.update(nlohmann::json::parse(model.small));
  return config;
}

int64_t SimShape::Width(int64_t small_width) const {
  const auto at =
      std::lower_bound(widths.begin(), widths.end(), std::pair(small_width, int64_t{0}));
  TANDEM_CHECK(at != widths.end() && at->first == small_width);
  return at->second;
}

int64_t SimShape::Groups(int64_t small_groups) const {
  if (small_groups == small.attention.heads) return big.attention.heads;
  if (small_groups == small.attention.kv_heads) return big.attention.kv_heads;
  TANDEM_CHECK(small_groups == 1);
  return 1;
}

double SimShape::expert_bytes() const {
  return 3.0 * big.hidden * big.moe.intermediate * bytes.experts;
}

double SimShape::expert_flops() const { return 2.0 * 3 * big.hidden * big.moe.intermediate; }

int64_t SimShape::cached_width() const {
  const AttentionSpec& a = big.attention;
  return a.kind == AttentionKind::kMla ? int64_t{a.kv_lora_rank} + a.rope_dim
                                       : int64_t{2} * a.kv_heads * a.head_dim;
}

double SimShape::attention_flops() const {
  const AttentionSpec& a = big.attention;
  // A product with the key and one with the value, which in MLA's latent form is the latent.
  const int width =
      a.kind == AttentionKind::kMla ? 2 * a.kv_lora_rank + a.rope_dim : 2 * a.head_dim;
  return 2.0 * a.heads * width;
}

absl::StatusOr<SimShape> MakeSimShape(const ModelSpec& small, const ModelSpec& big,
                                      const SimWeightBytes& bytes) {
  RETURN_IF_ERROR(CheckSameGraph(small, big));
  SimShape shape{.small = small, .big = big, .bytes = bytes};
  RETURN_IF_ERROR(AddWidth(small.hidden, big.hidden, shape));
  RETURN_IF_ERROR(AddWidth(small.vocab, big.vocab, shape));
  RETURN_IF_ERROR(AddWidth(small.moe.experts, big.moe.experts, shape));
  RETURN_IF_ERROR(AddWidth(small.moe.shared_intermediate, big.moe.shared_intermediate, shape));
  for (size_t i = 0; i < small.layers.size(); ++i) {
    RETURN_IF_ERROR(
        AddWidth(small.layers[i].dense_intermediate, big.layers[i].dense_intermediate, shape));
  }
  RETURN_IF_ERROR(AddAttention(small.attention, big.attention, shape));
  return shape;
}

absl::StatusOr<SimShape> MakeSimShape(const SimModel& model) {
  const std::string name(model.name);
  ASSIGN_OR_RETURN(const ModelSpec big,
                   ModelSpecFromJson(BigConfig(model), {.file = absl::StrCat(name, ".json")}));
  ASSIGN_OR_RETURN(
      const ModelSpec small,
      ModelSpecFromJson(SmallConfig(model), {.file = absl::StrCat(name, "-small.json")}));
  return MakeSimShape(small, big, model.bytes);
}

}  // namespace tandem::gpu
