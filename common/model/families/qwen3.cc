// Qwen3, dense: per-head RMSNorm of q and k, explicit head_dim.

#include "common/model/families/families.h"
#include "common/model/families/fill.h"
#include "common/model/families/qwen.h"

namespace tandem {
namespace {

void Fill(HubConfig& config, ModelSpec& spec) {
  FillDecoder(config, 1e-6f, spec);
  CheckQwenWindow(config, spec);
  const bool bias = config.BoolOr("attention_bias", false);
  FillGqa(config, {.qkv_bias = bias, .o_bias = bias, .qk_norm = true}, spec);
  const int intermediate = config.Int("intermediate_size", kDimBounds);
  for (size_t n = 0; n < spec.layers.size(); ++n) {
    FillDenseLayer(static_cast<int>(n), intermediate, false, spec);
  }
}

constexpr std::string_view kTypes[] = {"qwen3"};

}  // namespace

const ModelFamily kQwen3 = {kTypes, Fill};

}  // namespace tandem
