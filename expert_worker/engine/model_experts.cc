#include "expert_worker/engine/model_experts.h"

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/model/model_tensors.h"

namespace tandem::expert {

absl::StatusOr<StoreSpec> MakeStoreSpec(const Checkpoint& checkpoint, const ModelSpec& model,
                                        const ExpertTensors& tensors,
                                        std::span<const uint32_t> shares, uint32_t index) {
  if (model.moe.experts == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(checkpoint.dir(), ": ", model.model_type,
                     " has no routed experts; such a model is served without expert workers"));
  }
  StoreSpec spec;
  spec.model_hash = ModelHash(checkpoint, model);
  spec.format = tensors.native_dtype() == DType::kBF16 ? WeightFormat::kBf16 : WeightFormat::kF32;
  spec.layers = static_cast<uint32_t>(model.layers.size());
  for (uint32_t layer = 0; layer < spec.layers; ++layer) {
    if (model.layers[layer].moe) spec.moe_layers.push_back(layer);
  }
  spec.experts = static_cast<uint32_t>(model.moe.experts);
  spec.hidden = static_cast<uint32_t>(model.hidden);
  spec.intermediate = static_cast<uint32_t>(model.moe.intermediate);
  spec.quantum = ChooseQuantum(spec.intermediate);
  ASSIGN_OR_RETURN(spec.segments,
                   AssignSegments(SegmentCount(spec.intermediate, spec.quantum), shares, index));
  return spec;
}

}  // namespace tandem::expert
