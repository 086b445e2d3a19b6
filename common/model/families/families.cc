#include "common/model/families/families.h"

#include <algorithm>

namespace tandem {
namespace {

constexpr const ModelFamily* kFamilies[] = {
    &kLlama, &kQwen2, &kQwen3, &kQwen3Moe, &kMixtral, &kDeepseekV2, &kDeepseekV3,
};

}  // namespace

std::span<const ModelFamily* const> Families() { return kFamilies; }

const ModelFamily* FindFamily(std::string_view model_type) {
  for (const ModelFamily* family : kFamilies) {
    const auto& types = family->model_types;
    if (std::find(types.begin(), types.end(), model_type) != types.end()) return family;
  }
  return nullptr;
}

}  // namespace tandem
