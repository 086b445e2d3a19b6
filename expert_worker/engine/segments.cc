#include "expert_worker/engine/segments.h"

#include "absl/strings/str_cat.h"

namespace tandem::expert {

uint32_t ChooseQuantum(uint32_t intermediate) {
  for (uint32_t quantum : {64u, 32u, 16u, 8u}) {
    if (SegmentCount(intermediate, quantum) >= 4) return quantum;
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
