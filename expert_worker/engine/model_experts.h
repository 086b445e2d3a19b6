#pragma once

// From a model's description to the store of one worker's share of its routed experts.

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/expert_tensors.h"
#include "common/model/model_spec.h"
#include "expert_worker/engine/store_manifest.h"

namespace tandem::expert {

// Errors: FAILED_PRECONDITION for a model without routed experts; those of AssignSegments.
absl::StatusOr<StoreSpec> MakeStoreSpec(const Checkpoint& checkpoint, const ModelSpec& model,
                                        const ExpertTensors& tensors,
                                        std::span<const uint32_t> shares, uint32_t index);

}  // namespace tandem::expert
