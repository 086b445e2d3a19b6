// Feeds the readers of config.json: a model's spec, its quantization_config and ModelOpt's file.
// The bytes are the JSON text itself.
//
// Run: model_config_fuzz -runs=100000 -max_len=4096

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/base/check.h"
#include "common/model/hub_config.h"
#include "common/model/model_loader.h"
#include "common/model/quant_config.h"

namespace {

void CheckScheme(const tandem::QuantScheme& scheme) {
  TANDEM_CHECK(scheme.block.rows > 0 && scheme.block.cols > 0);
  for (const tandem::QuantizedWeights& weights : scheme.weights) {
    TANDEM_CHECK(weights.bits >= 1 && weights.bits <= 16);
    TANDEM_CHECK(weights.group_columns >= 0 && weights.group_columns <= 1 << 20);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto json = tandem::ParseJsonObject(text, "fuzz");
  if (!json.ok()) return 0;
  tandem::HubConfig config(*json, "fuzz");
  const tandem::QuantScheme scheme = tandem::ReadQuantScheme(config);
  if (config.status().ok()) CheckScheme(scheme);
  const auto modelopt = tandem::ReadModelOptScheme(*json, "fuzz");
  if (modelopt.ok()) CheckScheme(*modelopt);
  const auto spec = tandem::ModelSpecFromJson(*json, {.file = "fuzz"});
  TANDEM_CHECK(spec.ok() || !spec.status().message().empty());
  return 0;
}
