#include "expert_worker/engine/block_parts.h"

#include <algorithm>
#include <cstring>

#include "expert_worker/kernels/packed_matrix.h"

namespace tandem::expert {

uint32_t SegmentsPerTask(const WeightStore& store, uint32_t layer, uint32_t groups, int threads) {
  constexpr uint64_t kTaskBytes = 64 * 1024;
  constexpr uint64_t kTasksPerThread = 64;
  const uint64_t segments = uint64_t{groups} * store.segments();
  const uint64_t wanted = std::max(kTaskBytes / store.segment_bytes(layer),
                                   segments / (kTasksPerThread * static_cast<uint64_t>(threads)));
  return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, store.segments()));
}

uint32_t PanelsPerTask(uint32_t panels, int threads) {
  return std::clamp(panels / (4 * static_cast<uint32_t>(threads)), 1u, kMaxPanelsPerTask);
}

kernels::PackedMatrix PrepareGateUp(const WeightStore& store, uint32_t layer, uint32_t expert,
                                    uint32_t segment, float* sums, kernels::GemmCall* call) {
  const kernels::PackedMatrix weights = store.GateUp(layer, expert, segment);
  call->y = sums;
  call->y_stride = weights.n;
  call->panel_begin = 0;
  call->panel_end = kernels::PanelCount(weights.n);
  const float* bias = store.GateUpBias(layer, expert, segment);
  call->accumulate = bias != nullptr;
  for (uint32_t r = 0; bias != nullptr && r < call->rows; ++r) {
    std::memcpy(sums + size_t{r} * weights.n, bias, weights.n * sizeof(float));
  }
  return weights;
}

void Activate(const kernels::KernelTable& table, const kernels::SwigluClamp& clamp,
              const float* sums, uint32_t width, float* y) {
  if (clamp.limit > 0) {
    table.clamped_swiglu(clamp, sums, sums + width, y, width);
  } else {
    table.silu_mul(sums, sums + width, y, width);
  }
}

void ZeroRows(const shm::ExpertBatch& batch, int thread, int threads) {
  const Share share = ShareOf(batch.rows, thread, threads);
  std::memset(batch.out + size_t{share.begin} * batch.hidden, 0,
              size_t{share.end - share.begin} * batch.hidden * sizeof(float));
}

}  // namespace tandem::expert
