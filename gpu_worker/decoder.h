#pragma once

// The decoder of a transformer as backend ops: one call enqueues the forward of a step's rows, one
// the head of some of them. It holds buffers, not sequences; which rows, where their keys lie and
// how many there are is device memory (StepInputs), so the ops of a bucket are always the same.
//
// Thread safety: one thread enqueues; `progress` may be read by any. Ownership: references backend,
// spec, weights and cache, which must outlive it.

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/model/model_spec.h"
#include "gpu_worker/activations.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/kv_cache.h"
#include "gpu_worker/layers.h"
#include "gpu_worker/model_weights.h"

namespace tandem::gpu {

// Device memory that says what a step computes.
struct StepInputs {
  const int32_t* row_count = nullptr;
  const int32_t* ids = nullptr;  // [rows]
  RowPlace place;
};

// Sees intermediate results, for tests. Called while a step is enqueued; the callee synchronizes
// before it reads.
class DecoderTap {
 public:
  virtual ~DecoderTap() = default;
  // `layer` 0 is the embedding, layer n the residual stream after n layers: [rows, hidden].
  virtual void OnHidden(int layer, ConstMatrix hidden) = 0;
  // Raw logits of the rows that `indices` (device) names: [*count, vocab].
  virtual void OnLogits(const int32_t* indices, const int32_t* count, ConstMatrix logits) = 0;
};

struct DecoderOptions {
  int max_rows = 0;
  int head_rows = 0;  // rows of the logits buffer
};

// The smallest bucket that holds `rows`: a power of two, at most `max_rows`.
int BucketOf(int rows, int max_rows);

class Decoder {
 public:
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(Backend& backend, const ModelSpec& spec,
                                                         const ModelWeights& weights,
                                                         const KvCache& cache,
                                                         const DecoderOptions& options);

  // Embedding and all layers. REQUIRES: bucket <= max_rows; `link` set if the model has experts.
  void EnqueueForward(const StepInputs& inputs, int bucket, ExpertLink* link, int lane);
  // Final norm and head of the rows `indices` [*rows.count] of the last forward. Returns their
  // logits [rows, vocab], valid until the next call. REQUIRES: rows.bound <= head_rows.
  Matrix EnqueueHead(Rows rows, const int32_t* indices);

  const Activations& activations() const { return act_; }
  const DecoderOptions& options() const { return options_; }
  void set_tap(DecoderTap* tap) { tap_ = tap; }

  // Grows while ops are enqueued.
  uint64_t progress() const { return progress_.load(std::memory_order_relaxed); }
  // Time spent handing rows to experts and waiting for them, since the last call.
  int64_t TakeExpertWaitNs();

 private:
  Decoder(Backend& backend, const ModelSpec& spec, const ModelWeights& weights,
          const KvCache& cache, const DecoderOptions& options)
      : backend_(backend), spec_(spec), weights_(weights), cache_(cache), options_(options) {}
  void EnqueueLayer(const StepContext& step, int index, const RouterPicks* picks);
  void Progress() { progress_.fetch_add(1, std::memory_order_relaxed); }

  Backend& backend_;
  const ModelSpec& spec_;
  const ModelWeights& weights_;
  const KvCache& cache_;
  const DecoderOptions options_;
  Activations act_;
  DecoderTap* tap_ = nullptr;
  std::atomic<uint64_t> progress_{0};
  int64_t expert_wait_ns_ = 0;
};

}  // namespace tandem::gpu
