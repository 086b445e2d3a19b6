// Llama 2 and 3, SmolLM2: dense, grouped-query attention, optional llama3 RoPE scaling.

#include "common/model/families/families.h"
#include "common/model/families/fill.h"

namespace tandem {
namespace {

void Fill(HubConfig& config, ModelSpec& spec) {
  FillDecoder(config, 1e-6f, spec);
  const bool attention_bias = config.BoolOr("attention_bias", false);
  FillGqa(config, {.qkv_bias = attention_bias, .o_bias = attention_bias}, spec);
  const int intermediate = config.Int("intermediate_size", kDimBounds);
  const bool mlp_bias = config.BoolOr("mlp_bias", false);
  for (size_t n = 0; n < spec.layers.size(); ++n) {
    FillDenseLayer(static_cast<int>(n), intermediate, mlp_bias, spec);
  }
}

constexpr std::string_view kTypes[] = {"llama"};

}  // namespace

const ModelFamily kLlama = {kTypes, Fill};

}  // namespace tandem
