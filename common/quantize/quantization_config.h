#pragma once

// The quantization_config that compressed-tensors, and so transformers and vLLM, read: which
// modules are quantized and how. One config group a group size; modules that are not quantized are
// listed by name in `ignore`, so that every reader agrees with the files.

#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "common/quantize/quantize_plan.h"

namespace tandem {

// REQUIRES: at least one item is quantized. Errors: INVALID_ARGUMENT when modules of one name (like
// down_proj) need different groups, which the config has no words for.
absl::StatusOr<nlohmann::ordered_json> MakeQuantizationConfig(
    const std::vector<QuantizeFile>& files);

}  // namespace tandem
