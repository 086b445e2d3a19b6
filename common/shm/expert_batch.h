// What an expert worker is asked to compute, as plain data, and the interface of whoever computes
// it.
//
// An ExpertBatch is one MoE layer of one lane: `rows` activations with their routed experts. It is
// what crosses the expert link, whichever link that is (shared memory or in-process), after every
// count, length and expert id has been bounded: a handler may index by them without checks.
//
// A BatchHandler (the routed-expert engine; fakes in tests) is called SPMD: all `threads` threads
// of the caller's pool call Run with the same batch and their own `thread`, concurrently, and Run
// returns on each of them when that thread's part is done; the caller puts a barrier before and
// after. Barriers inside Run are the handler's.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"

namespace tandem::shm {

// An entry of `ids` with this value names no expert of this worker: skipped, its weight is ignored.
inline constexpr uint16_t kNoExpert = 0xFFFF;

// Element type of activation rows on the link. Results are always F32.
enum class RowType : uint32_t {
  kBf16 = 1,  // default mode
  kF32 = 2,   // parity mode
};

constexpr uint32_t RowTypeBytes(RowType type) { return type == RowType::kBf16 ? 2 : 4; }

// Upper bounds that hold for every batch of one attachment. Buffers are sized from them before the
// first Run.
struct BatchLimits {
  uint32_t max_rows = 0;     // rows of one batch
  uint32_t hidden = 0;       // elements of a row
  uint32_t top_k = 0;        // picks of a row
  uint32_t num_experts = 0;  // ids are < num_experts or kNoExpert; <= 0xFFFF
  uint32_t num_layers = 0;   // layer < num_layers
  uint32_t lanes = 0;        // lane < lanes
  RowType row_type = RowType::kBf16;
};

// One layer of one lane. Pointers are valid only during Run. All arrays are dense, row-major.
struct ExpertBatch {
  // Batches of one step share `step`; what a handler carries from layer to layer (deferred picks)
  // is dropped when `step` or `epoch` (the attachment) changes.
  uint64_t step = 0;
  uint64_t epoch = 0;
  uint32_t lane = 0;
  uint32_t layer = 0;
  uint32_t rows = 0;  // may be 0
  uint32_t top_k = 0;
  uint32_t hidden = 0;
  RowType row_type = RowType::kBf16;
  uint32_t flags = 0;       // submission flags, passed through
  const void* x = nullptr;  // [rows, hidden] of row_type; may lie in memory shared with the peer
  const uint16_t* ids = nullptr;   // [rows, top_k] private copy
  const float* weights = nullptr;  // [rows, top_k] private copy; untrusted values, may be NaN
  const uint8_t* deferred =
      nullptr;           // [rows, top_k] of 0 or 1, private copy; null when no pick is deferred
  float* out = nullptr;  // [rows, hidden] this worker's partial sums; every element must be stored
  std::atomic<uint64_t>* ticks = nullptr;  // progress counter, may be null; see Tick
};

// To be called per finished task (some 10 us to 10 ms of work). The other side waits as long as
// ticks go on, and gives up on the worker when none came for its deadline, so that a hung thread
// shows.
inline void Tick(const ExpertBatch& batch) {
  if (batch.ticks != nullptr) batch.ticks->fetch_add(1, std::memory_order_relaxed);
}

class BatchHandler {
 public:
  virtual ~BatchHandler() = default;

  // Called by one thread when a peer attaches, while no Run is in progress: all allocation happens
  // here. An error refuses the attachment.
  virtual absl::Status Configure(const BatchLimits& limits) = 0;

  // Data plane: no allocation, lock, log. REQUIRES: Configure succeeded; 0 <= thread < threads.
  virtual void Run(const ExpertBatch& batch, int thread, int threads) = 0;

  // Called SPMD after the results of a batch with deferred picks went back: the place for what
  // nobody waits for (the deferred picks' sums, carried into the lane's next layer). Same pointers
  // as in Run; `out` must not be written.
  virtual void RunDeferred(const ExpertBatch& /*batch*/, int /*thread*/, int /*threads*/) {}
};

}  // namespace tandem::shm
