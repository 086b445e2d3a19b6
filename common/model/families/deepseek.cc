#include "common/model/families/deepseek.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/quote.h"
#include "common/model/families/fill.h"
#include "common/model/rope.h"

namespace tandem {
namespace {

void FillMlaNames(const std::string& prefix, bool bias, bool q_lora, AttentionNames& names) {
  if (q_lora) {
    names.q_a = Linear(prefix + "q_a_proj", bias);
    names.q_a_norm = prefix + "q_a_layernorm.weight";
    names.q_b = Linear(prefix + "q_b_proj", false);
  } else {
    names.q = Linear(prefix + "q_proj", false);
  }
  names.kv_a = Linear(prefix + "kv_a_proj_with_mqa", bias);
  names.kv_a_norm = prefix + "kv_a_layernorm.weight";
  names.kv_b = Linear(prefix + "kv_b_proj", false);
  names.o = Linear(prefix + "o_proj", bias);
}

}  // namespace

void FillMla(HubConfig& config, ModelSpec& spec) {
  AttentionSpec& attention = spec.attention;
  attention.kind = AttentionKind::kMla;
  attention.heads = config.Int("num_attention_heads", kHeadBounds);
  attention.kv_heads = attention.heads;
  // Null is a value here: no low-rank factors, one plain q_proj.
  attention.q_lora_rank =
      config.IsNull("q_lora_rank") ? 0 : config.IntOr("q_lora_rank", 1536, kDimBounds);
  attention.kv_lora_rank = config.IntOr("kv_lora_rank", 512, kDimBounds);
  attention.nope_dim = config.IntOr("qk_nope_head_dim", 128, {.max = 4096});
  attention.rope_dim = config.IntOr("qk_rope_head_dim", 64, {.max = 4096});
  attention.v_dim = config.IntOr("v_head_dim", 128, {.max = 4096});
  attention.head_dim = attention.nope_dim + attention.rope_dim;
  if (attention.rope_dim % 2 != 0) config.Fail("qk_rope_head_dim", "is odd: RoPE needs pairs");
  const bool interleaved = config.BoolOr("rope_interleave", true);
  const bool bias = config.BoolOr("attention_bias", false);
  const RopeConfig rope = ReadRopeConfig(config, 10000);
  if (!config.status().ok()) return;
  const RopeTable table = MakeRopeTable(rope, attention.rope_dim);
  spec.rope = {interleaved ? RopeLayout::kInterleaved : RopeLayout::kHalf, attention.rope_dim,
               table.inv_freq, table.attention_factor};
  spec.max_context = ContextTokens(rope, spec.max_context);
  attention.softmax_scale =
      static_cast<float>(YarnSoftmaxFactor(rope) / std::sqrt(double{1} * attention.head_dim));
  for (size_t n = 0; n < spec.layers.size(); ++n) {
    FillMlaNames(LayerPrefix(static_cast<int>(n)) + "self_attn.", bias, attention.q_lora_rank > 0,
                 spec.layers[n].attention);
  }
}

void FillDeepseekMoe(HubConfig& config, const DeepseekDefaults& defaults, ModelSpec& spec) {
  MoeSpec& moe = spec.moe;
  moe.experts = config.Int("n_routed_experts", kExpertBounds);
  moe.top_k = config.Int("num_experts_per_tok", kExpertBounds);
  moe.intermediate = config.Int("moe_intermediate_size", kDimBounds);
  const int shared =
      config.IsNull("n_shared_experts")
          ? 0
          : config.IntOr("n_shared_experts", defaults.shared_experts, {.min = 0, .max = 1024});
  moe.shared_intermediate = moe.intermediate * shared;
  // 0 would silence every routed expert: the bound excludes it.
  moe.router.factor =
      static_cast<float>(config.RealOr("routed_scaling_factor", defaults.routed_factor, 0, 1e6));
  CheckMoe(config, spec);
  const int first =
      config.IntOr("first_k_dense_replace", defaults.first_k_dense, {.min = 0, .max = 1 << 20});
  const int step = config.IntOr("moe_layer_freq", 1, {.max = 1 << 20});
  int dense_intermediate = 0;
  for (int n = 0; n < static_cast<int>(spec.layers.size()); ++n) {
    if (n >= first && n % step == 0) {
      FillMoeLayer(n, {}, spec);
      continue;
    }
    if (dense_intermediate == 0) dense_intermediate = config.Int("intermediate_size", kDimBounds);
    FillDenseLayer(n, dense_intermediate, false, spec);
  }
}

void ExpectString(HubConfig& config, const char* key, const char* value) {
  const std::string given = config.StringOr(key, value);
  if (given == value) return;
  config.Fail(key, absl::StrCat("is ", QuoteForMessage(given), ", this family supports only '",
                                value, "'"));
}

}  // namespace tandem
