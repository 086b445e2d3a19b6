#pragma once

// The decoder of a transformer as backend ops: one call enqueues the forward of a step's rows, one
// the head of some of them. It holds buffers, not sequences; which rows, where their keys lie and
// how many there are is device memory (StepInputs), so the ops of a bucket are always the same.
//
// Thread safety: one thread enqueues; `progress` may be read by any. Ownership: references backend,
// spec, weights and cache, which must outlive it.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/model_spec.h"
#include "gpu_worker/activations.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/kv_cache.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/pipeline.h"

namespace tandem::gpu {

struct DecoderOptions {
  int buffer_rows = 0;  // rows of a forward, gaps between lanes included
  int head_rows = 0;    // rows of the logits buffer
  SplitOptions split;
};

// The smallest bucket that holds `rows`: a power of two, at most `max_rows`.
int BucketOf(int rows, int max_rows);

class Decoder {
 public:
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(Backend& backend, const ModelSpec& spec,
                                                         const ModelWeights& weights,
                                                         const KvCache& cache,
                                                         const DecoderOptions& options);

  // Embedding and all layers. REQUIRES: lanes lie within buffer_rows; `link` is set if the model
  // has experts.
  void EnqueueForward(const StepInputs& inputs, ExpertLink* link) {
    pipeline_->Enqueue(inputs, link);
  }
  // Final norm and head of the rows `indices` [*rows.count] of the last forward. Returns their
  // logits [rows, vocab], valid until the next call. REQUIRES: rows.bound <= head_rows.
  Matrix EnqueueHead(Rows rows, const int32_t* indices);

  const Activations& activations() const { return act_; }
  // One a MoE layer, in layer order.
  const std::vector<RouterPicks>& picks() const { return picks_; }
  const DecoderOptions& options() const { return options_; }
  void set_tap(DecoderTap* tap);

  // Grows while ops are enqueued.
  uint64_t progress() const { return pipeline_->progress(); }

 private:
  Decoder(Backend& backend, const ModelSpec& spec, const ModelWeights& weights,
          const DecoderOptions& options)
      : backend_(backend), spec_(spec), weights_(weights), options_(options) {}

  Backend& backend_;
  const ModelSpec& spec_;
  const ModelWeights& weights_;
  const DecoderOptions options_;
  Activations act_;
  std::vector<RouterPicks> picks_;
  std::unique_ptr<Pipeline> pipeline_;
  DecoderTap* tap_ = nullptr;
};

}  // namespace tandem::gpu
