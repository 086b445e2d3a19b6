// Qwen3-MoE (30B-A3B, 235B-A22B, Coder-480B): Qwen3 attention, softmax router, no shared expert.

#include <algorithm>
#include <vector>

#include "common/model/families/families.h"
#include "common/model/families/fill.h"
#include "common/model/families/qwen.h"

namespace tandem {
namespace {

void FillMoe(HubConfig& config, ModelSpec& spec) {
  MoeSpec& moe = spec.moe;
  moe.experts = config.Int("num_experts", kExpertBounds);
  moe.top_k = config.Int("num_experts_per_tok", kExpertBounds);
  moe.intermediate = config.Int("moe_intermediate_size", kDimBounds);
  // The class default of transformers; every release says true.
  moe.router.renormalize = config.BoolOr("norm_topk_prob", false);
  CheckMoe(config, spec);
}

void Fill(HubConfig& config, ModelSpec& spec) {
  FillDecoder(config, 1e-6f, spec);
  CheckQwenWindow(config, spec);
  const bool bias = config.BoolOr("attention_bias", false);
  FillGqa(config, {.qkv_bias = bias, .o_bias = bias, .qk_norm = true}, spec);
  FillMoe(config, spec);
  const int step = config.IntOr("decoder_sparse_step", 1, {.max = 1 << 20});
  const std::vector<int> dense = config.Ints("mlp_only_layers", {.min = 0, .max = 1 << 20});
  int dense_intermediate = 0;
  for (int n = 0; n < static_cast<int>(spec.layers.size()); ++n) {
    const bool listed = std::find(dense.begin(), dense.end(), n) != dense.end();
    if (!listed && (n + 1) % step == 0) {
      FillMoeLayer(n, {}, spec);
      continue;
    }
    if (dense_intermediate == 0) dense_intermediate = config.Int("intermediate_size", kDimBounds);
    FillDenseLayer(n, dense_intermediate, false, spec);
  }
}

constexpr std::string_view kTypes[] = {"qwen3_moe"};

}  // namespace

const ModelFamily kQwen3Moe = {kTypes, Fill};

}  // namespace tandem
