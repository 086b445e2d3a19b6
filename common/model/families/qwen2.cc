// Qwen2 and Qwen2.5, dense: biases on q, k and v only.

#include "common/model/families/families.h"
#include "common/model/families/fill.h"
#include "common/model/families/qwen.h"

namespace tandem {
namespace {

void Fill(HubConfig& config, ModelSpec& spec) {
  FillDecoder(config, 1e-6f, spec);
  CheckQwenWindow(config, spec);
  FillGqa(config, {.qkv_bias = true}, spec);
  const int intermediate = config.Int("intermediate_size", kDimBounds);
  for (size_t n = 0; n < spec.layers.size(); ++n) {
    FillDenseLayer(static_cast<int>(n), intermediate, false, spec);
  }
}

constexpr std::string_view kTypes[] = {"qwen2"};

}  // namespace

void CheckQwenWindow(HubConfig& config, const ModelSpec& spec) {
  if (!config.BoolOr("use_sliding_window", false) || !config.Has("sliding_window")) return;
  const int layers = static_cast<int>(spec.layers.size());
  const int first = config.IntOr("max_window_layers", 28, {.min = 0, .max = 1 << 20});
  if (first < layers) {
    config.Fail("use_sliding_window", "is true for some layers only, which is not supported");
  }
}

const ModelFamily kQwen2 = {kTypes, Fill};

}  // namespace tandem
