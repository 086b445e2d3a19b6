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

}  // namespace

PanelGeometry GeometryOf(WeightFormat format, uint32_t k, uint32_t group_columns) {
  const FormatTraits& t = TraitsOf(format);
  const auto region = [](size_t bytes) { return RoundUpTo(bytes, kPackAlignment); };
  PanelGeometry g{};
  g.padded_k = static_cast<uint32_t>(RoundUpTo(k, kStepAlign));
  g.groups = group_columns == 0 ? 1 : (k + group_columns - 1) / group_columns;
  g.supers = t.super == SuperType::kF32Row ? 1 : (k + kSuperBlockColumns - 1) / kSuperBlockColumns;
  g.scales = region(size_t{g.supers} * kPanelWidth * SuperBytes(t.super));
  g.mins = g.scales + region(size_t{g.groups} * kPanelWidth * ScaleBytes(t.scale));
  g.codes = g.mins + region(size_t{g.groups} * kPanelWidth * MinBytes(t.min));
  const size_t weights = size_t{g.padded_k} * kPanelWidth;
  g.plane = g.codes + CodeBytes(t.codes, k, weights);
  g.bit_plane = g.plane + (HasTwoBitPlane(t.codes) ? weights / 4 : 0);
  g.bytes = region(g.bit_plane + (HasBitPlane(t.codes) ? weights / 8 : 0));
  return g;
}

}  // namespace tandem::kernels
