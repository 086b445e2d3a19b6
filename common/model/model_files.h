#pragma once

// What a model's path says besides its weights, whatever the path is: config.json and
// generation_config.json of a directory, or the key/values of a GGUF file in the same terms.
//
// The one place that tells the two kinds of model apart for those who read no weights. Errors name
// file and key.

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/gguf.h"
#include "common/model/model_loader.h"
#include "common/model/model_spec.h"

namespace tandem {

struct ModelFiles {
  std::string path;         // as given
  std::string config_file;  // what `config` was read from
  nlohmann::json config;
  GenerationConfig generation;      // a GGUF file says nothing of it
  std::unique_ptr<GgufModel> gguf;  // null: a directory of hub files
};

absl::StatusOr<ModelFiles> OpenModelFiles(const std::string& path);

// The spec without a look at the weights: tensors unchecked, GGUF's RoPE factors not applied.
absl::StatusOr<ModelSpec> ParseModelSpec(const ModelFiles& files);

// config.json of `dir`, or of `gguf` in its place unless that is null; and its name for messages.
std::string ConfigFile(const std::string& dir, const GgufModel* gguf);
absl::StatusOr<nlohmann::json> ReadModelConfig(const std::string& dir, const GgufModel* gguf);

}  // namespace tandem
