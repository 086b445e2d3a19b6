#include "gpu_worker/backend_cpu/top_tokens.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace tandem::gpu {
namespace {

int64_t BlockCount(int64_t n) { return (n + kBlockTokens - 1) / kBlockTokens; }

// A value that at least k tokens reach: the k-th largest block maximum.
float LowerBoundOfTop(int64_t n, int64_t k, ThreadScratch& scratch) {
  const int64_t blocks = BlockCount(n);
  if (k > blocks) return -std::numeric_limits<float>::infinity();
  const auto begin = scratch.block_order.begin();
  std::copy_n(scratch.block_max.begin(), blocks, begin);
  std::nth_element(begin, begin + (k - 1), begin + blocks, std::greater<float>());
  return begin[k - 1];
}

}  // namespace

float FindBlockMax(const VectorTable& vectors, const float* values, int64_t n,
                   ThreadScratch& scratch) {
  const int64_t blocks = BlockCount(n);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = b * kBlockTokens;
    scratch.block_max[static_cast<size_t>(b)] =
        vectors.max(values + begin, static_cast<size_t>(std::min(kBlockTokens, n - begin)));
  }
  return vectors.max(scratch.block_max.data(), static_cast<size_t>(blocks));
}

int64_t CollectAtLeast(const float* values, int64_t n, float threshold, ThreadScratch& scratch) {
  int64_t count = 0;
  for (int64_t b = 0; b < BlockCount(n); ++b) {
    if (!(scratch.block_max[static_cast<size_t>(b)] >= threshold)) continue;
    const int64_t end = std::min((b + 1) * kBlockTokens, n);
    for (int64_t i = b * kBlockTokens; i < end; ++i) {
      // Without a branch: in a block that has one wanted token, the others are a coin toss.
      scratch.ids[static_cast<size_t>(count)] = static_cast<int32_t>(i);
      count += values[i] >= threshold ? 1 : 0;
    }
  }
  return count;
}

int64_t SelectTop(const float* values, int64_t n, int64_t k, ThreadScratch& scratch) {
  k = std::min(k, n);
  if (k <= 0) return 0;
  const int64_t count = CollectAtLeast(values, n, LowerBoundOfTop(n, k, scratch), scratch);
  const auto begin = scratch.ids.begin();
  const ByValue order{values};
  if (k < count) std::nth_element(begin, begin + k, begin + count, order);
  std::sort(begin, begin + k, order);
  return k;
}

}  // namespace tandem::gpu
