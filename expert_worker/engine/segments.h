#pragma once

// Cutting experts along the intermediate dimension: `quantum` consecutive intermediate features,
// with their gate rows, up rows and down columns, are a segment; a worker owns a range of segments
// of every expert. Segments do not depend on the number of workers. Pure functions.

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "common/tensor/expert_weights.h"

namespace tandem::expert {

struct SegmentRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t size() const { return end - begin; }
  bool operator==(const SegmentRange&) const = default;
};

using tandem::LayerFormat;
using tandem::MatrixFormat;

// Whether kernels multiply it: the integer ones need scales over a power of two of dot groups.
bool IsSupported(const MatrixFormat& m);

// Whether every segment lies within a group and super-block of down's columns or is a whole number
// of them: then each segment holds copies of the scales it touches, and any cut is exact.
bool QuantumFits(const MatrixFormat& down, uint32_t quantum);

// The largest fitting one of 64, 32, 16, 8 and 4 that leaves at least four segments, else 4. Gate
// and up of 64 features are four panels, as many as a kernel walks at a time, and a down panel is
// then 4 KiB of BF16: shorter ones are read from memory at two thirds of the speed. 128 where a
// scale or super scale covers 128 columns or more, so that down's are not stored twice; no more,
// since a decode step of 8 experts has only intermediate / quantum tasks an expert to spread over
// threads. `layers`: of the whole model. REQUIRES: not empty.
uint32_t ChooseQuantum(uint32_t intermediate, std::span<const LayerFormat> layers);

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
