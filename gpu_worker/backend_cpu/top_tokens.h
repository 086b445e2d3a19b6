#pragma once

// Finding the few largest of a whole vocabulary without sorting it. The largest value of every
// block of kBlockTokens is taken first; it tells which blocks can hold a wanted token, usually a
// few dozen of thousands. Exact; ties go to the lowest id. Values must not be NaN.

#include <cstdint>

#include "gpu_worker/backend_cpu/op_context.h"

namespace tandem::gpu {

inline constexpr int64_t kBlockTokens = 64;

// Order of tokens: larger value first, then the lower id.
struct ByValue {
  const float* values;
  bool operator()(int32_t a, int32_t b) const {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
  }
};

// Fills scratch.block_max for values[0, n); returns the largest of all.
float FindBlockMax(const VectorTable& vectors, const float* values, int64_t n,
                   ThreadScratch& scratch);

// Writes the ids with values >= threshold to scratch.ids, ascending; returns how many.
// REQUIRES: FindBlockMax was called for the same values.
int64_t CollectAtLeast(const float* values, int64_t n, float threshold, ThreadScratch& scratch);

// Writes the ids of the min(k, n) largest values to scratch.ids, in order; returns how many.
// REQUIRES: FindBlockMax was called for the same values.
int64_t SelectTop(const float* values, int64_t n, int64_t k, ThreadScratch& scratch);

}  // namespace tandem::gpu
