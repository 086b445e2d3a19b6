#include "expert_worker/engine/model_experts.h"

#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/model/model_loader.h"
#include "common/model/model_tensors.h"

namespace tandem::expert {
namespace {

MatrixFormat CommonFormat(const ExpertSource& source, int layer, int experts,
                          std::initializer_list<ExpertPart> parts) {
  const MatrixFormat first = source.format({layer, 0, *parts.begin()});
  bool same = IsSupported(first);
  bool bf16 = true;
  for (int expert = 0; expert < experts; ++expert) {
    for (const ExpertPart part : parts) {
      const MatrixFormat format = source.format({layer, expert, part});
      same = same && format == first;
      bf16 = bf16 && format.format == WeightFormat::kBf16;
    }
  }
  if (same) return first;
  return {bf16 ? WeightFormat::kBf16 : WeightFormat::kF32, 0};
}

}  // namespace

LayerFormat ChooseLayerFormat(const ExpertSource& source, int layer, int experts) {
  return {CommonFormat(source, layer, experts, {ExpertPart::kGate, ExpertPart::kUp}),
          CommonFormat(source, layer, experts, {ExpertPart::kDown})};
}

absl::StatusOr<StoreSpec> MakeStoreSpec(const Checkpoint& checkpoint, const ModelSpec& model,
                                        const ExpertTensors& tensors,
                                        std::span<const uint32_t> shares, uint32_t index) {
  if (model.moe.experts == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(checkpoint.dir(), ": ", model.model_type,
                     " has no routed experts; such a model is served without expert workers"));
  }
  const CheckpointExperts source(&tensors);
  StoreSpec spec;
  spec.model_hash = ModelHash(checkpoint, model);
  spec.layers = static_cast<uint32_t>(model.layers.size());
  for (uint32_t layer = 0; layer < spec.layers; ++layer) {
    if (!model.layers[layer].moe) continue;
    spec.moe_layers.push_back(layer);
    spec.formats.push_back(
        ChooseLayerFormat(source, static_cast<int>(layer), static_cast<int>(model.moe.experts)));
  }
  spec.experts = static_cast<uint32_t>(model.moe.experts);
  spec.hidden = static_cast<uint32_t>(model.hidden);
  spec.intermediate = static_cast<uint32_t>(model.moe.intermediate);
  spec.quantum = ChooseQuantum(spec.intermediate, spec.formats);
  ASSIGN_OR_RETURN(spec.segments,
                   AssignSegments(SegmentCount(spec.intermediate, spec.quantum), shares, index));
  return spec;
}

absl::StatusOr<std::vector<uint64_t>> StoreBytes(const Checkpoint& checkpoint,
                                                 const ModelSpec& model,
                                                 std::span<const uint32_t> shares) {
  ASSIGN_OR_RETURN(const ExpertTensors tensors, ExpertTensors::Create(checkpoint, model));
  ASSIGN_OR_RETURN(StoreSpec spec, MakeStoreSpec(checkpoint, model, tensors, shares, 0));
  std::vector<uint64_t> bytes;
  for (uint32_t index = 0; index < shares.size(); ++index) {
    ASSIGN_OR_RETURN(spec.segments,
                     AssignSegments(SegmentCount(spec.intermediate, spec.quantum), shares, index));
    ASSIGN_OR_RETURN(const StoreManifest manifest, MakeManifest(spec));
    bytes.push_back(manifest.file_bytes);
  }
  return bytes;
}

absl::StatusOr<PackedFile> PackModel(const std::string& model_dir, const std::string& state_dir,
                                     int threads, LoadProgress* progress) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(model_dir));
  ASSIGN_OR_RETURN(const ModelSpec model, LoadModelSpec(*checkpoint));
  ASSIGN_OR_RETURN(const ExpertTensors tensors, ExpertTensors::Create(*checkpoint, model));
  constexpr uint32_t kShares[] = {1};
  ASSIGN_OR_RETURN(const StoreSpec spec, MakeStoreSpec(*checkpoint, model, tensors, kShares, 0));
  return PackedFile::OpenOrPack(PackedFile::PathFor(state_dir, spec), spec,
                                CheckpointExperts(&tensors), threads, progress);
}

}  // namespace tandem::expert
