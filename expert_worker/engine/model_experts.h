#pragma once

// From a model's description to the store of one worker's share of its routed experts.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/expert_tensors.h"
#include "common/model/model_spec.h"
#include "expert_worker/engine/expert_source.h"
#include "expert_worker/engine/packed_file.h"
#include "expert_worker/engine/store_manifest.h"

namespace tandem::expert {

// How a layer's experts are packed: in their own format where all of them share one that kernels
// multiply, else as exact values, BF16 where all are BF16 and F32 where not.
LayerFormat ChooseLayerFormat(const ExpertSource& source, int layer, int experts);

// Errors: FAILED_PRECONDITION for a model without routed experts; those of AssignSegments.
absl::StatusOr<StoreSpec> MakeStoreSpec(const Checkpoint& checkpoint, const ModelSpec& model,
                                        const ExpertTensors& tensors,
                                        std::span<const uint32_t> shares, uint32_t index);

// The memory that the stores of all workers of `shares` take, by worker; nothing is read but tensor
// headers. Errors: those of ExpertTensors and MakeStoreSpec.
absl::StatusOr<std::vector<uint64_t>> StoreBytes(const Checkpoint& checkpoint,
                                                 const ModelSpec& model,
                                                 std::span<const uint32_t> shares);

// Writes the packed file of a model directory, unless it is there and intact. Errors: those of
// opening the model and of PackedFile.
absl::StatusOr<PackedFile> PackModel(const std::string& model_dir, const std::string& state_dir,
                                     int threads, LoadProgress* progress);

}  // namespace tandem::expert
