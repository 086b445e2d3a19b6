#pragma once

// From a model to a ModelSpec: reads config.json and generation_config.json, or a GGUF file's
// key/values, finds the family, and lets it fill the spec. Nothing is loaded; files are small and
// bounded.
//
// Errors name the file and the key: a missing or null required key, a value out of bounds, an
// unknown architecture (the message lists those that are supported), an unsupported feature. A
// value that this engine would silently compute wrongly is refused, never ignored.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model_spec.h"

namespace tandem {

// The spec of a checkpoint, with every tensor checked (CheckTensors) and end_ids the union of
// config.json's and generation_config.json's.
absl::StatusOr<ModelSpec> LoadModelSpec(const Checkpoint& checkpoint);

struct ConfigSource {
  std::string file;  // for messages
  // Where the config does not say whether embeddings are tied, presence of a head decides.
  bool has_head = true;
};

// The same from the text of a config.json alone. end_ids are those of the config.
absl::StatusOr<ModelSpec> ParseModelSpec(std::string_view config_json, const ConfigSource& source);
absl::StatusOr<ModelSpec> ModelSpecFromJson(const nlohmann::json& json, const ConfigSource& source);

// What generation_config.json says; everything absent when there is no such file.
struct GenerationConfig {
  std::vector<uint32_t> end_ids;
  std::optional<bool> do_sample;
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<int> top_k;
};

absl::StatusOr<GenerationConfig> LoadGenerationConfig(const std::string& dir);

}  // namespace tandem
