#pragma once

// Sampling values that apply where a request says nothing: those of the model's
// generation_config.json, else neutral ones (temperature 1, nothing cut).

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "absl/status/statusor.h"

namespace tandem::gateway {

struct GenerationDefaults {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
};

// `source` names the text in errors. INVALID_ARGUMENT for broken JSON or values out of range.
absl::StatusOr<GenerationDefaults> ParseGenerationDefaults(std::string_view json,
                                                           std::string_view source);

// Reads generation_config.json of a model directory; neutral values where there is none.
absl::StatusOr<GenerationDefaults> LoadGenerationDefaults(const std::filesystem::path& model_dir);

}  // namespace tandem::gateway
