#pragma once

// What the two ways of computing the block (parity_block.h, fast_block.h) share.

#include <atomic>
#include <cstdint>

#include "common/shm/team_barrier.h"
#include "common/shm/waiting.h"
#include "expert_worker/engine/batch_groups.h"
#include "expert_worker/engine/weight_store.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::expert {

// All outlive the blocks. `barrier` is for `threads` threads.
struct BlockContext {
  const WeightStore* store;
  const kernels::KernelTable* table;
  int threads;
  shm::SpinPolicy spin;
  shm::TeamBarrier* barrier;
  const BatchGroups* groups;

  void Wait() const {
    if (threads > 1) barrier->Wait(spin);
  }
};

constexpr uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

struct Share {
  uint32_t begin;
  uint32_t end;
};

constexpr Share ShareOf(uint32_t count, int thread, int threads) {
  const uint64_t n = count;
  return {static_cast<uint32_t>(n * static_cast<uint64_t>(thread) / static_cast<uint64_t>(threads)),
          static_cast<uint32_t>(n * static_cast<uint64_t>(thread + 1) /
                                static_cast<uint64_t>(threads))};
}

// Tasks that threads claim, alone on its cache lines. Reset by one thread before a barrier.
struct alignas(128) TaskCounter {
  std::atomic<uint32_t> next{0};

  void Reset() { next.store(0, std::memory_order_relaxed); }
  uint32_t Claim() { return next.fetch_add(1, std::memory_order_relaxed); }
};

// Rows that gate and up are computed for at a time: 48 x 128 sums are 24 KiB, which stay in L1
// until the activation has read them.
inline constexpr uint32_t kGateUpRows = 48;
inline constexpr uint32_t kMaxPanelsPerTask = 16;

// Owned segments of a task of one of `groups` experts: 64 KiB of weights or more, so that claiming
// (some 50 ns) vanishes beside reading them (3 us and more), and more while there are 64 tasks a
// thread, since weights that follow each other are read best; no more, so that the threads end
// together.
uint32_t SegmentsPerTask(const WeightStore& store, uint32_t layer, uint32_t groups, int threads);

// Output panels of a down task: four tasks a thread.
uint32_t PanelsPerTask(uint32_t panels, int threads);

// The bias of a segment's gate and up, if there is one, goes into the rows of sums first.
// Completes `call` for gate and up of an owned segment, rows and x given: y is `sums`
// [call.rows, 2 * segment_width].
kernels::PackedMatrix PrepareGateUp(const WeightStore& store, uint32_t layer, uint32_t expert,
                                    uint32_t segment, float* sums, kernels::GemmCall* call);

// y[width] = the activation of gate sums [width], then up sums [width]; y may be `sums`.
void Activate(const kernels::KernelTable& table, const kernels::SwigluClamp& clamp,
              const float* sums, uint32_t width, float* y);

// Writes zeros to this thread's share of the batch's results.
void ZeroRows(const shm::ExpertBatch& batch, int thread, int threads);

}  // namespace tandem::expert
