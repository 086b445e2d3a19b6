#pragma once

// What the Qwen families share beyond fill.h.

#include "common/model/hub_config.h"
#include "common/model/model_spec.h"

namespace tandem {

// Qwen configs may give a sliding window to the layers from max_window_layers on. No release uses
// it, and one window for all layers would be wrong: refused unless it applies to no layer.
void CheckQwenWindow(HubConfig& config, const ModelSpec& spec);

}  // namespace tandem
