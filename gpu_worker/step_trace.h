#pragma once

// A step on the timeline (common/base/trace.h), added when it has ended: what the device did from
// the step's stamps, what crossed the expert link from the link's times, and the host's part. So it
// looks the same whether ops run as they are enqueued or on a device of their own.
//
// Tracks: "executor" (the thread that enqueues), "device" (its queue), and one a lane for the link:
// rows on their way, experts at work, sums on their way back. "streamed experts": the copies of a
// prompt's layers to the device. Hot experts' copies are in a track of their own thread
// (hot_experts/hot_experts.h).
//
// A device's clock has an origin of its own. It is joined to ours where a step's last op and
// Synchronize ended, so its times are late by what Synchronize takes to return.
//
// Thread safety: one thread. Ownership: the tracer must outlive it.

#include <array>
#include <cstdint>
#include <vector>

#include "common/base/trace.h"
#include "gpu_worker/expert_link.h"
#include "gpu_worker/hot_experts/expert_stream.h"
#include "gpu_worker/layers.h"
#include "gpu_worker/pipeline.h"

namespace tandem::gpu {

// The host's time at the corners of a step, ns.
struct HostStamps {
  int64_t begin_ns = 0;
  int64_t prepared_ns = 0;  // rows are chosen and uploaded
  int64_t enqueued_ns = 0;
  int64_t synchronized_ns = 0;
};

// One step that has ended well.
struct TracedStep {
  uint64_t step = 0;  // as the expert link counts them
  uint64_t gateway_step = 0;
  int rows = 0;
  int lanes = 1;
  bool logprobs = false;  // they were asked for
  StepStamps device;
  const LayerStamps* layers = nullptr;   // [lanes, MoE layers]
  const ExpertStream* stream = nullptr;  // null: nothing was streamed
};

class StepTrace {
 public:
  // Null: nothing is ever traced.
  explicit StepTrace(Tracer* tracer);

  // Before the first step: the link's numbers of the MoE layers, ascending.
  void set_layers(std::vector<int> moe_layers) { moe_layers_ = std::move(moe_layers); }

  // A step begins. True: it is traced, so it needs all of its stamps, and then Mark in the order of
  // HostStamps, and End. One that fails is begun and not ended.
  bool Begin();
  bool tracing() const { return host_.begin_ns != 0; }
  void Mark(int64_t HostStamps::*corner) {
    if (tracing()) host_.*corner = TraceNowNs();
  }
  void End(const TracedStep& step, const ExpertLink* link);

 private:
  void AddHost(const TracedStep& step);
  void AddLayer(const TracedStep& step, int lane, size_t moe_layer, int64_t shift_ns);
  void AddLink(const TracedStep& step, int lane, size_t moe_layer, int64_t shift_ns,
               const LayerTimes& times);
  void AddCopies(const TracedStep& step, size_t moe_layer, int64_t shift_ns);
  const LayerStamps& stamps(const TracedStep& step, int lane, size_t moe_layer) const {
    return step.layers[static_cast<size_t>(lane) * moe_layers_.size() + moe_layer];
  }

  TraceTrack* executor_;
  TraceTrack* device_;
  TraceTrack* copies_;
  std::array<TraceTrack*, kMaxLanes> links_;
  std::vector<int> moe_layers_;
  HostStamps host_;  // of the step in progress; all zero: it is not traced
};

}  // namespace tandem::gpu
