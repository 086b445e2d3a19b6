#include "expert_worker/engine/segments.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "expert_worker/kernels/formats.h"

namespace tandem::expert {
namespace {

bool Divides(uint32_t columns, uint32_t quantum) {
  return columns % quantum == 0 || quantum % columns == 0;
}

}  // namespace

bool IsSupported(const MatrixFormat& m) {
  if (m.format >= WeightFormat::kCount) return false;
  const uint32_t dot_group = kernels::TraitsOf(m.format).dot_group;
  if (m.group_columns == 0 || dot_group == 0) return true;
  return m.group_columns % dot_group == 0 && std::has_single_bit(m.group_columns / dot_group);
}

bool QuantumFits(const MatrixFormat& down, uint32_t quantum) {
  const kernels::SuperType super = kernels::TraitsOf(down.format).super;
  const bool blocks = super == kernels::SuperType::kF16 || super == kernels::SuperType::kF16Pair;
  return (down.group_columns == 0 || Divides(down.group_columns, quantum)) &&
         (!blocks || Divides(kSuperBlockColumns, quantum));
}

uint32_t ChooseQuantum(uint32_t intermediate, std::span<const LayerFormat> layers) {
  const bool wide = std::ranges::all_of(layers, [](const LayerFormat& layer) {
    const MatrixFormat& down = layer.down;
    const bool super = kernels::TraitsOf(down.format).super != kernels::SuperType::kNone;
    return !IsPlain(down.format) && (super || down.group_columns == 0 || down.group_columns >= 128);
  });
  for (uint32_t quantum : {128u, 64u, 32u, 16u, 8u}) {
    if (quantum == 128 && !wide) continue;
    const bool fits = std::ranges::all_of(
        layers, [&](const LayerFormat& layer) { return QuantumFits(layer.down, quantum); });
    if (fits && SegmentCount(intermediate, quantum) >= 4) return quantum;
  }
  return 4;
}

absl::StatusOr<SegmentRange> AssignSegments(uint32_t segments, std::span<const uint32_t> shares,
                                            uint32_t index) {
  if (index >= shares.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker index ", index, " is not below the ", shares.size(), " shares"));
  }
  uint64_t before = 0;
  uint64_t total = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    if (i < index) before += shares[i];
    total += shares[i];
  }
  if (total == 0) return absl::InvalidArgumentError("the shares of the expert workers sum to 0");
  const auto cut = [&](uint64_t share) {
    return static_cast<uint32_t>((share * segments + total / 2) / total);
  };
  return SegmentRange{cut(before), cut(before + shares[index])};
}

}  // namespace tandem::expert
