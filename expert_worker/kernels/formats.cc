#include "expert_worker/kernels/formats.h"

namespace tandem::kernels {
namespace {

// Bytes of the codes proper and of the two planes of upper bits, for `weights` padded codes.
size_t CodeBytes(CodeStorage codes, uint32_t k, size_t weights) {
  switch (codes) {
    case CodeStorage::kF32:
      return size_t{k} * kPanelWidth * 4;
    case CodeStorage::kBf16:
      return RoundUpTo(k, 2) * kPanelWidth * 2;
    case CodeStorage::kF16:
      return size_t{k} * kPanelWidth * 2;
    case CodeStorage::kE4m3:
    case CodeStorage::k8:
      return weights;
    case CodeStorage::k4:
    case CodeStorage::k5:
    case CodeStorage::k6:
      return weights / 2;
    case CodeStorage::k2:
    case CodeStorage::k3:
      return 0;
  }
  return 0;
}

bool HasTwoBitPlane(CodeStorage codes) {
  return codes == CodeStorage::k6 || codes == CodeStorage::k2 || codes == CodeStorage::k3;
}

bool HasBitPlane(CodeStorage codes) { return codes == CodeStorage::k5 || codes == CodeStorage::k3; }

size_t Region(size_t bytes) { return RoundUpTo(bytes, kPackAlignment); }

BlockGeometry BlockOf(const FormatTraits& t, uint32_t inputs, uint32_t group_columns) {
  BlockGeometry g{};
  g.inputs = inputs;
  g.groups = group_columns == 0 ? 0 : (inputs + group_columns - 1) / group_columns;
  const bool super = t.super == SuperType::kF16 || t.super == SuperType::kF16Pair;
  g.scales = super ? Region(size_t{kPanelWidth} * SuperBytes(t.super)) : 0;
  g.mins = g.scales + Region(size_t{g.groups} * kPanelWidth * ScaleBytes(t.scale));
  g.bit_plane = g.mins + Region(size_t{g.groups} * kPanelWidth * MinBytes(t.min));
  const size_t weights = RoundUpTo(inputs, kStepAlign) * kPanelWidth;
  g.plane = g.bit_plane + (HasBitPlane(t.codes) ? Region(weights / 8) : 0);
  g.codes = g.plane + (HasTwoBitPlane(t.codes) ? weights / 4 : 0);
  g.bytes = Region(g.codes + CodeBytes(t.codes, inputs, weights));
  return g;
}

}  // namespace

PanelGeometry GeometryOf(WeightFormat format, uint32_t k, uint32_t group_columns) {
  const FormatTraits& t = TraitsOf(format);
  PanelGeometry g{};
  g.padded_k = static_cast<uint32_t>(RoundUpTo(k, kStepAlign));
  g.blocks = (k + kBlockInputs - 1) / kBlockInputs;
  const bool whole = group_columns == 0;
  g.head_scales = t.super == SuperType::kF32Row ? Region(size_t{kPanelWidth} * 4) : 0;
  g.head_mins = g.head_scales + (whole ? Region(size_t{kPanelWidth} * ScaleBytes(t.scale)) : 0);
  g.head_bytes = g.head_mins + (whole ? Region(size_t{kPanelWidth} * MinBytes(t.min)) : 0);
  g.full = BlockOf(t, kBlockInputs, group_columns);
  g.last = BlockOf(t, k - (g.blocks - 1) * kBlockInputs, group_columns);
  g.bytes = g.head_bytes + (g.blocks - 1) * g.full.bytes + g.last.bytes;
  return g;
}

}  // namespace tandem::kernels
