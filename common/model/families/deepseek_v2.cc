// DeepSeek-V2 and V2-Lite: MLA (V2-Lite without a low-rank q), softmax router, its groups scored by
// their best expert, weights never renormalized.

#include "absl/strings/str_cat.h"
#include "common/checkpoint/quote.h"
#include "common/model/families/deepseek.h"
#include "common/model/families/families.h"
#include "common/model/families/fill.h"

namespace tandem {
namespace {

void FillRouter(HubConfig& config, RouterSpec& router) {
  router.score = RouterScore::kSoftmax;
  router.renormalize = false;
  router.group_score_max = true;
  ExpectString(config, "scoring_func", "softmax");
  if (config.BoolOr("norm_topk_prob", false)) {
    config.Fail("norm_topk_prob", "is true, which no deepseek_v2 release uses and none defines");
  }
  const std::string method = config.StringOr("topk_method", "greedy");
  if (method == "greedy") return;
  if (method != "group_limited_greedy") {
    config.Fail("topk_method", absl::StrCat("is ", QuoteForMessage(method),
                                            ", supported are greedy and group_limited_greedy"));
    return;
  }
  router.groups = config.Int("n_group", kExpertBounds);
  router.groups_kept = config.Int("topk_group", kExpertBounds);
}

void Fill(HubConfig& config, ModelSpec& spec) {
  FillDecoder(config, 1e-6f, spec);
  FillMla(config, spec);
  FillRouter(config, spec.moe.router);
  FillDeepseekMoe(config, {.first_k_dense = 0, .shared_experts = 2, .routed_factor = 1}, spec);
}

constexpr std::string_view kTypes[] = {"deepseek_v2"};

}  // namespace

const ModelFamily kDeepseekV2 = {kTypes, Fill};

}  // namespace tandem
