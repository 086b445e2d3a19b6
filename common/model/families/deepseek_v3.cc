// DeepSeek-V3, R1 and Kimi-K2: MLA, sigmoid router with a bias for selection only, groups scored by
// the sum of their two best experts, renormalized weights times a factor. The MTP layer's tensors
// (index num_hidden_layers) are not read.

#include "common/model/families/deepseek.h"
#include "common/model/families/families.h"
#include "common/model/families/fill.h"

namespace tandem {
namespace {

void FillRouter(HubConfig& config, RouterSpec& router) {
  router.score = RouterScore::kSigmoid;
  router.selection_bias = true;
  router.renormalize = config.BoolOr("norm_topk_prob", true);
  router.renormalize_eps = 1e-20f;
  ExpectString(config, "scoring_func", "sigmoid");
  ExpectString(config, "topk_method", "noaux_tc");
  router.groups = config.IntOr("n_group", 8, kExpertBounds);
  router.groups_kept = config.IntOr("topk_group", 4, kExpertBounds);
}

void Fill(HubConfig& config, ModelSpec& spec) {
  FillDecoder(config, 1e-6f, spec);
  FillMla(config, spec);
  FillRouter(config, spec.moe.router);
  FillDeepseekMoe(config, {.first_k_dense = 3, .shared_experts = 1, .routed_factor = 2.5}, spec);
}

constexpr std::string_view kTypes[] = {"deepseek_v3", "kimi_k2"};

}  // namespace

const ModelFamily kDeepseekV3 = {kTypes, Fill};

}  // namespace tandem
