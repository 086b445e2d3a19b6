#pragma once

// What DeepSeek-V2 and V3 share: multi-head latent attention, shared experts, dense first layers.

#include "common/model/hub_config.h"
#include "common/model/model_spec.h"

namespace tandem {

struct DeepseekDefaults {
  int first_k_dense = 0;
  int shared_experts = 0;
  double routed_factor = 1;
};

// MLA: dimensions, names, interleaved RoPE, softmax scale with YaRN's m^2.
void FillMla(HubConfig& config, ModelSpec& spec);

// Counts of experts and which layers have them. REQUIRES: spec.moe.router is filled but for its
// factor and groups.
void FillDeepseekMoe(HubConfig& config, const DeepseekDefaults& defaults, ModelSpec& spec);

// The config may repeat what the family implies; another value is refused, never ignored.
void ExpectString(HubConfig& config, const char* key, const char* value);

}  // namespace tandem
