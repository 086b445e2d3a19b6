#include "common/model/families/fill.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/quote.h"
#include "common/model/rope.h"

namespace tandem {

std::string LayerPrefix(int n) { return absl::StrCat("model.layers.", n, "."); }

void FillDecoder(HubConfig& config, float eps_absent, ModelSpec& spec) {
  spec.hidden = config.Int("hidden_size", kDimBounds);
  spec.vocab = config.Int("vocab_size", {.max = 1 << 24});
  spec.max_context = config.Int("max_position_embeddings", {.max = 1 << 30});
  spec.norm_eps = static_cast<float>(config.RealOr("rms_norm_eps", eps_absent, 0, 1));
  const std::string activation = config.StringOr("hidden_act", "silu");
  if (activation != "silu") {
    config.Fail("hidden_act",
                absl::StrCat("is ", QuoteForMessage(activation), ", only silu is supported"));
  }
  spec.embedding = "model.embed_tokens.weight";
  spec.final_norm = "model.norm.weight";
  spec.head = "lm_head.weight";
  spec.layers.resize(static_cast<size_t>(config.Int("num_hidden_layers", {.max = 1024})));
  for (size_t n = 0; n < spec.layers.size(); ++n) {
    const std::string prefix = LayerPrefix(static_cast<int>(n));
    spec.layers[n].input_norm = prefix + "input_layernorm.weight";
    spec.layers[n].post_attention_norm = prefix + "post_attention_layernorm.weight";
  }
}

LinearNames Linear(const std::string& module, bool bias) {
  return {module + ".weight", bias ? module + ".bias" : ""};
}

MlpNames SwigluNames(const std::string& prefix, bool bias) {
  return {Linear(prefix + ".gate_proj", bias), Linear(prefix + ".up_proj", bias),
          Linear(prefix + ".down_proj", bias)};
}

namespace {

void FillGqaDims(HubConfig& config, AttentionSpec& attention, int hidden) {
  attention.kind = AttentionKind::kGqa;
  attention.heads = config.Int("num_attention_heads", kHeadBounds);
  attention.kv_heads = config.IntOr("num_key_value_heads", attention.heads, kHeadBounds);
  if (attention.heads % attention.kv_heads != 0) {
    config.Fail("num_key_value_heads",
                absl::StrCat("is ", attention.kv_heads, " and does not divide num_attention_heads ",
                             attention.heads));
  }
  if (!config.Has("head_dim") && hidden % attention.heads != 0) {
    config.Fail("num_attention_heads", "does not divide hidden_size, and there is no head_dim");
  }
  attention.head_dim =
      config.IntOr("head_dim", std::max(1, hidden / attention.heads), {.max = 4096});
  if (attention.head_dim % 2 != 0) config.Fail("head_dim", "is odd: RoPE needs pairs");
  attention.softmax_scale = 1 / std::sqrt(static_cast<float>(attention.head_dim));
}

}  // namespace

void FillGqa(HubConfig& config, const GqaOptions& options, ModelSpec& spec) {
  AttentionSpec& attention = spec.attention;
  FillGqaDims(config, attention, spec.hidden);
  attention.qk_norm = options.qk_norm;
  if (config.RealOr("partial_rotary_factor", 1, 0, 1) != 1) {
    config.Fail("partial_rotary_factor", "is not 1, which this family does not support");
  }
  const RopeConfig rope = ReadRopeConfig(config, options.theta_absent);
  if (!config.status().ok()) return;  // what follows computes with the values read
  const RopeTable table = MakeRopeTable(rope, attention.head_dim);
  spec.rope = {RopeLayout::kHalf, attention.head_dim, table.inv_freq, table.attention_factor};
  spec.max_context = ContextTokens(rope, spec.max_context);
  for (size_t n = 0; n < spec.layers.size(); ++n) {
    const std::string prefix = LayerPrefix(static_cast<int>(n)) + "self_attn.";
    AttentionNames& names = spec.layers[n].attention;
    names.q = Linear(prefix + "q_proj", options.qkv_bias);
    names.k = Linear(prefix + "k_proj", options.qkv_bias);
    names.v = Linear(prefix + "v_proj", options.qkv_bias);
    names.o = Linear(prefix + "o_proj", options.o_bias);
    if (!options.qk_norm) continue;
    names.q_norm = prefix + "q_norm.weight";
    names.k_norm = prefix + "k_norm.weight";
  }
}

void FillDenseLayer(int n, int intermediate, bool bias, ModelSpec& spec) {
  LayerSpec& layer = spec.layers[static_cast<size_t>(n)];
  layer.moe = false;
  layer.dense_intermediate = intermediate;
  layer.mlp = SwigluNames(LayerPrefix(n) + "mlp", bias);
}

void FillMoeLayer(int n, const MoeNames& names, ModelSpec& spec) {
  LayerSpec& layer = spec.layers[static_cast<size_t>(n)];
  const std::string block = LayerPrefix(n) + std::string(names.block);
  const auto part = [&block](std::string_view name) {
    return absl::StrCat(block, ".experts.%d.", std::string(name), ".weight");
  };
  layer.moe = true;
  layer.router_weight = block + ".gate.weight";
  if (spec.moe.router.selection_bias) layer.router_bias = block + ".gate.e_score_correction_bias";
  layer.expert_gate = part(names.gate);
  layer.expert_up = part(names.up);
  layer.expert_down = part(names.down);
  if (spec.moe.shared_intermediate > 0) layer.mlp = SwigluNames(block + ".shared_experts", false);
}

void CheckMoe(HubConfig& config, const ModelSpec& spec) {
  const MoeSpec& moe = spec.moe;
  const RouterSpec& router = moe.router;
  if (moe.top_k > moe.experts) {
    config.Fail("num_experts_per_tok",
                absl::StrCat("is ", moe.top_k, ", above the ", moe.experts, " experts"));
  }
  // Kimi-K2, the largest, has 61 x 384; a lying config must not cost gigabytes of names.
  constexpr int64_t kMaxExpertsInAll = 1 << 18;
  if (moe.experts * static_cast<int64_t>(spec.layers.size()) > kMaxExpertsInAll) {
    config.Fail("num_hidden_layers",
                absl::StrCat("times ", moe.experts, " experts is above ", kMaxExpertsInAll));
  }
  if (moe.experts % router.groups != 0) {
    config.Fail("n_group", absl::StrCat("is ", router.groups, " and does not divide the ",
                                        moe.experts, " experts"));
    return;
  }
  if (router.groups_kept > router.groups) {
    config.Fail("topk_group",
                absl::StrCat("is ", router.groups_kept, ", above n_group ", router.groups));
  }
  const int group_experts = moe.experts / router.groups;
  if (moe.top_k > group_experts * router.groups_kept) {
    config.Fail("topk_group", "keeps groups with fewer experts than num_experts_per_tok");
  }
  if (router.groups > 1 && !router.group_score_max && group_experts < 2) {
    config.Fail("n_group", "leaves groups of one expert, the group score sums two");
  }
}

}  // namespace tandem
