#pragma once

// config.json's quantization_config (or its older or nested spellings) as a QuantScheme: fp8,
// mxfp8, mxfp4, compressed-tensors, awq, gptq, modelopt; and ModelOpt's own hf_quant_config.json.
//
// A method, format or option that would be computed wrongly is recorded as an error naming file and
// key. Lists of modules that are not converted are not read: the tensors show it. Activation
// quantization is not read either: weights are multiplied by activations of higher precision.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/quant_scheme.h"
#include "common/model/hub_config.h"

namespace tandem {

// Errors go to `config`. No such object: QuantMethod::kNone.
QuantScheme ReadQuantScheme(HubConfig& config);

// The root object of hf_quant_config.json.
absl::StatusOr<QuantScheme> ReadModelOptScheme(const nlohmann::json& root, const std::string& file);

}  // namespace tandem
