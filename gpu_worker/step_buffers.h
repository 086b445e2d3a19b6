#pragma once

// What the host tells the device about one step, and what it reads back: pairs of a host staging
// array and device memory of the same size, allocated once for the largest step.
//
// Thread safety: none. Ownership: device memory belongs to the backend.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/base/status.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/layers.h"
#include "gpu_worker/pipeline.h"
#include "gpu_worker/sequence_table.h"

namespace tandem::gpu {

template <typename T>
class StagedArray {
 public:
  absl::Status Create(Backend& backend, size_t size) {
    host_.resize(size);
    ASSIGN_OR_RETURN(void* memory, backend.Allocate(size * sizeof(T)));
    device_ = static_cast<T*>(memory);
    return absl::OkStatus();
  }
  T& operator[](size_t i) { return host_[i]; }
  const T& operator[](size_t i) const { return host_[i]; }
  size_t size() const { return host_.size(); }
  T* host() { return host_.data(); }
  const T* host() const { return host_.data(); }
  auto begin() const { return host_.begin(); }
  T* device() const { return device_; }

  void Upload(Backend& backend, size_t count) const {
    if (count > 0) backend.CopyToDevice(device_, host_.data(), count * sizeof(T));
  }
  void Download(Backend& backend, size_t count) {
    if (count > 0) backend.CopyToHost(host_.data(), device_, count * sizeof(T));
  }

 private:
  std::vector<T> host_;
  T* device_ = nullptr;
};

// What the host reads back of every MoE layer: the host's side of a device array [layers, stride].
template <typename T>
class LayerArray {
 public:
  void Create(size_t layers, size_t stride) {
    layers_ = layers;
    stride_ = stride;
    host_.assign(layers * stride, T{});
  }
  size_t layers() const { return layers_; }
  const T* operator[](size_t layer) const { return host_.data() + layer * stride_; }

  // The first `count` of each layer. REQUIRES: count <= stride.
  void Download(Backend& backend, const T* device, size_t count) {
    if (count == 0 || layers_ == 0) return;
    backend.CopyRunsToHost({.host = host_.data(),
                            .device = device,
                            .run_bytes = count * sizeof(T),
                            .stride_bytes = stride_ * sizeof(T),
                            .count = layers_});
  }

 private:
  size_t layers_ = 0;
  size_t stride_ = 0;
  std::vector<T> host_;
};

// Log-probabilities of some rows: what to report, and the report.
struct LogprobBuffers {
  absl::Status Create(Backend& backend, size_t rows, int max_logprobs);
  LogprobsArgs Args(Rows rows, ConstMatrix logits, int64_t vocab, size_t first_row) const;
  void Download(Backend& backend, size_t count);

  StagedArray<int32_t> targets;  // [rows]
  StagedArray<int32_t> top;      // [rows]
  StagedArray<float> logprobs;   // [rows]
  StagedArray<int32_t> ranks;    // [rows]
  StagedArray<int32_t> top_ids;  // [rows, max_top]
  StagedArray<float> top_logprobs;
  int max_top = 0;
};

struct StepBuffers {
  struct Sizes {
    int rows = 0;       // of a step, with the gap between its lanes
    int head_rows = 0;  // of the logits
    int stamps = 0;     // lanes * MoE layers
  };
  absl::Status Create(Backend& backend, const SequenceLimits& limits, const Sizes& sizes);

  StagedArray<int32_t> row_count;        // [lanes]
  StagedArray<int32_t> ids;              // [rows]
  StagedArray<int32_t> positions;        // [rows]
  StagedArray<int32_t> row_sequence;     // [rows]: row of block_table
  StagedArray<uint8_t> may_defer;        // [rows]
  StagedArray<int32_t> block_table;      // [sequences, blocks_per_sequence]
  StagedArray<DeferralLimits> deferral;  // [1]
  StagedArray<LayerStamps> stamps;       // [lanes, MoE layers]
  StagedArray<StepStamps> step_stamps;   // [1]

  StagedArray<int32_t> sample_count;  // [1]
  StagedArray<int32_t> sample_rows;   // [sequences]
  StagedArray<SampleParams> params;   // [sequences]
  StagedArray<int32_t> bias_ids;      // of all sequences, one after the other
  StagedArray<float> bias_values;
  StagedArray<int32_t> banned_ids;
  StagedArray<int32_t> tokens;  // [sequences]
  LogprobBuffers sampled;       // [sequences]; its targets are `tokens`

  StagedArray<int32_t> prompt_counts;  // [chunks]: rows of each chunk of prompt logprobs
  StagedArray<int32_t> prompt_rows;    // [rows]
  LogprobBuffers prompt;               // [rows]

  StagedArray<int32_t> copy_source;  // [kCopiesAtOnce]
  StagedArray<int32_t> copy_target;
  static constexpr int kCopiesAtOnce = 256;
};

}  // namespace tandem::gpu
