#pragma once

// The families that config.json's model_type selects. Adding one whose ops exist: one file here
// that defines its ModelFamily, and one line in kFamilies (families.cc).
//
// A family turns a config into a ModelSpec: dimensions, rotary table, router, and tensor names. It
// reads its keys from `config`, which keeps the first error; shared rules (bounds, defaults, the
// usual tensor names) are in fill.h.

#include <span>
#include <string_view>

#include "common/model/hub_config.h"
#include "common/model/model_spec.h"

namespace tandem {

struct ModelFamily {
  std::span<const std::string_view> model_types;  // spellings of config.json's model_type
  void (*fill)(HubConfig& config, ModelSpec& spec);
};

// Null for an unknown type.
const ModelFamily* FindFamily(std::string_view model_type);

// All model types, in the order of the list.
std::span<const ModelFamily* const> Families();

extern const ModelFamily kLlama;
extern const ModelFamily kQwen2;
extern const ModelFamily kQwen3;
extern const ModelFamily kQwen3Moe;
extern const ModelFamily kMixtral;
extern const ModelFamily kDeepseekV2;
extern const ModelFamily kDeepseekV3;

}  // namespace tandem
