#pragma once

// A GGUF's key/values in the terms of the hub's config.json, so that every family reads one form.
// What the keys do not say in numbers is read off the tensors: biases, the vocabulary's size, the
// head (absent: tied), and llama3's RoPE scaling, which is a tensor of divisors.
//
// Errors name the file and the key: a required key that is missing, one of another kind, a scaling
// of activations that no supported family has, head dimensions that are only partly rotated.

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/gguf.h"
#include "common/model/model_spec.h"

namespace tandem {

absl::StatusOr<nlohmann::json> GgufHubConfig(const GgufModel& model);

// Divides spec.rope's frequencies by the file's factors, where it has some.
absl::Status ApplyGgufRopeFactors(const GgufModel& model, ModelSpec& spec);

}  // namespace tandem
