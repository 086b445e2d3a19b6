#pragma once

// Cutting experts along the intermediate dimension: `quantum` consecutive intermediate features,
// with their gate rows, up rows and down columns, are a segment; a worker owns a range of segments
// of every expert. Segments do not depend on the number of workers. Pure functions.

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"

namespace tandem::expert {

struct SegmentRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t size() const { return end - begin; }
  bool operator==(const SegmentRange&) const = default;
};

// The largest of 64, 32, 16, 8 and 4 that leaves at least four segments, else 4. Gate and up of 64
// features are four panels, as many as a kernel walks at a time, and a down panel is then 4 KiB of
// BF16: shorter ones are read from memory at two thirds of the speed.
uint32_t ChooseQuantum(uint32_t intermediate);

// The last segment is narrower where the quantum does not divide the dimension.
constexpr uint32_t SegmentCount(uint32_t intermediate, uint32_t quantum) {
  return (intermediate + quantum - 1) / quantum;
}

// The segments of worker `index`: cumulative shares, rounded to whole segments, so that the ranges
// of all workers are disjoint, cover everything, and a share of 0 owns nothing. Errors:
// INVALID_ARGUMENT for an index beyond the shares or shares that sum to 0.
absl::StatusOr<SegmentRange> AssignSegments(uint32_t segments, std::span<const uint32_t> shares,
                                            uint32_t index);

}  // namespace tandem::expert
