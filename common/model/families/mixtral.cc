// Mixtral 8x7B and 8x22B: Llama attention, every layer MoE, softmax over all experts, renormalized
// top-k; the experts' parts are named w1 (gate), w3 (up) and w2 (down).

#include "common/model/families/families.h"
#include "common/model/families/fill.h"

namespace tandem {
namespace {

void Fill(HubConfig& config, ModelSpec& spec) {
  FillDecoder(config, 1e-5f, spec);
  FillGqa(config, {.theta_absent = 1e6}, spec);
  const int window = config.IntOr("sliding_window", 0, {.min = 0, .max = 1 << 30});
  if (window < spec.max_context) spec.attention.window_tokens = window;
  spec.moe.experts = config.Int("num_local_experts", kExpertBounds);
  spec.moe.top_k = config.Int("num_experts_per_tok", kExpertBounds);
  spec.moe.intermediate = config.Int("intermediate_size", kDimBounds);
  CheckMoe(config, spec);
  const MoeNames names{.block = "block_sparse_moe", .gate = "w1", .up = "w3", .down = "w2"};
  for (size_t n = 0; n < spec.layers.size(); ++n) {
    FillMoeLayer(static_cast<int>(n), names, spec);
  }
}

constexpr std::string_view kTypes[] = {"mixtral"};

}  // namespace

const ModelFamily kMixtral = {kTypes, Fill};

}  // namespace tandem
