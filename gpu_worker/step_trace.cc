#include "gpu_worker/step_trace.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace tandem::gpu {
namespace {

constexpr std::array<const char*, 4> kStepArgs = {"step"};
constexpr std::array<const char*, 4> kLayerArgs = {"step", "layer", "lane"};

constexpr TraceKind kStep = {"step", TraceRole::kStep, {"step", "gateway_step", "rows", "lanes"}};
constexpr TraceKind kPrepare = {"prepare", TraceRole::kFrame, kStepArgs};
constexpr TraceKind kEnqueue = {"enqueue", TraceRole::kFrame, kStepArgs};
constexpr TraceKind kSynchronize = {"synchronize", TraceRole::kFrame, kStepArgs};
constexpr TraceKind kCommit = {"commit", TraceRole::kFrame, kStepArgs};

constexpr TraceKind kEmbed = {"embed, dense layers", TraceRole::kBusy, kStepArgs};
constexpr TraceKind kLayers = {"layers", TraceRole::kBusy, kStepArgs};
constexpr TraceKind kAttention = {"attention", TraceRole::kBusy, kLayerArgs};
constexpr TraceKind kRouter = {"router", TraceRole::kBusy, kLayerArgs};
constexpr TraceKind kSubmit = {"submit", TraceRole::kSend, kLayerArgs};
constexpr TraceKind kShared = {"shared experts", TraceRole::kBusy, kLayerArgs};
constexpr TraceKind kWait = {"wait", TraceRole::kCollect, kLayerArgs};
constexpr TraceKind kHead = {"head", TraceRole::kBusy, kStepArgs};
constexpr TraceKind kSample = {"sampling", TraceRole::kBusy, kStepArgs};
constexpr TraceKind kLogprobs = {"log-probabilities", TraceRole::kBusy, kStepArgs};

constexpr TraceKind kCopiesWait = {"wait for copies", TraceRole::kStall, kLayerArgs};
constexpr TraceKind kCopies = {
    "copy experts", TraceRole::kBusy, {"step", "layer", "experts", "bytes"}};

constexpr TraceKind kToExperts = {"rows to experts", TraceRole::kFrame, kLayerArgs};
constexpr TraceKind kAtExperts = {"experts", TraceRole::kFrame, kLayerArgs};
constexpr TraceKind kFromExperts = {"sums back", TraceRole::kFrame, kLayerArgs};

// A device whose clock ends a step so close to ours has our clock: no other origin is that near.
constexpr int64_t kSameClockNs = 10'000'000;

TraceTrack* MakeTrack(Tracer* tracer, const std::string& name) {
  return tracer != nullptr ? tracer->AddTrack(name) : TraceTrack::None();
}

int64_t Signed(uint64_t number) { return static_cast<int64_t>(number); }

// From one corner to the next, which it becomes. Corners that were not stamped are left out, and a
// clock without order gives no negative times.
class Corners {
 public:
  Corners(TraceTrack& track, int64_t shift_ns, const TraceArgs& args)
      : track_(track), shift_ns_(shift_ns), args_(args) {}

  void From(int64_t stamp_ns) { at_ns_ = stamp_ns; }
  void To(const TraceKind& kind, int64_t stamp_ns) {
    if (stamp_ns == 0) return;
    if (at_ns_ != 0 && stamp_ns > at_ns_) {
      track_.Add(kind, at_ns_ + shift_ns_, stamp_ns + shift_ns_, args_);
    }
    at_ns_ = std::max(at_ns_, stamp_ns);
  }

 private:
  TraceTrack& track_;
  const int64_t shift_ns_;
  const TraceArgs args_;
  int64_t at_ns_ = 0;
};

}  // namespace

StepTrace::StepTrace(Tracer* tracer)
    : executor_(MakeTrack(tracer, "executor")),
      device_(MakeTrack(tracer, "device")),
      copies_(MakeTrack(tracer, "streamed experts")) {
  for (size_t lane = 0; lane < links_.size(); ++lane) {
    links_[lane] = MakeTrack(tracer, "expert link, lane " + std::to_string(lane));
  }
}

bool StepTrace::Begin() {
  host_ = {};
  if (executor_->on()) host_.begin_ns = TraceNowNs();
  return tracing();
}

void StepTrace::End(const TracedStep& step, const ExpertLink* link) {
  const StepStamps& device = step.device;
  const int64_t late_ns = host_.synchronized_ns - device.end;
  const int64_t shift_ns = std::abs(late_ns) < kSameClockNs ? 0 : late_ns;
  const bool moe = !moe_layers_.empty();
  Corners whole(*device_, shift_ns, {Signed(step.step)});
  whole.From(device.begin);
  whole.To(moe ? kEmbed : kLayers, moe ? stamps(step, 0, 0).begin : device.layers);
  for (size_t i = 0; i < moe_layers_.size(); ++i) {
    if (step.stream != nullptr) AddCopies(step, i, shift_ns);
    for (int lane = 0; lane < step.lanes; ++lane) {
      AddLayer(step, lane, i, shift_ns);
      AddLink(
          step, lane, i, shift_ns,
          link->layer_times(static_cast<uint32_t>(lane), static_cast<uint32_t>(moe_layers_[i])));
    }
  }
  whole.From(device.layers);
  whole.To(kHead, device.head);
  whole.To(kSample, device.sampled);
  if (step.logprobs) whole.To(kLogprobs, device.end);
  AddHost(step);
}

void StepTrace::AddHost(const TracedStep& step) {
  Corners host(*executor_, 0, {Signed(step.step)});
  const int64_t end_ns = TraceNowNs();
  host.From(host_.begin_ns);
  host.To(kPrepare, host_.prepared_ns);
  host.To(kEnqueue, host_.enqueued_ns);
  host.To(kSynchronize, host_.synchronized_ns);
  host.To(kCommit, end_ns);
  executor_->Add(kStep, host_.begin_ns, end_ns,
                 {Signed(step.step), Signed(step.gateway_step), step.rows, step.lanes});
}

void StepTrace::AddLayer(const TracedStep& step, int lane, size_t moe_layer, int64_t shift_ns) {
  const LayerStamps& at = stamps(step, lane, moe_layer);
  Corners corners(*device_, shift_ns, {Signed(step.step), moe_layers_[moe_layer], lane});
  corners.From(at.begin);
  corners.To(kAttention, at.attended);
  corners.To(kRouter, at.submit);
  corners.To(kSubmit, at.submitted);
  if (step.stream != nullptr) {
    // The first lane waits for both: for the other these corners lie before its part.
    const ExpertStream::LayerCopies copies = step.stream->copies(moe_layer);
    corners.To(kShared, copies.wait_begin);
    corners.To(kCopiesWait, copies.wait_end);
  }
  corners.To(kShared, at.shared);
  corners.From(at.wait);  // another lane's part may lie between
  corners.To(kWait, at.done);
}

void StepTrace::AddCopies(const TracedStep& step, size_t moe_layer, int64_t shift_ns) {
  const ExpertStream::LayerCopies copies = step.stream->copies(moe_layer);
  Corners corners(
      *copies_, shift_ns,
      {Signed(step.step), moe_layers_[moe_layer], copies.experts, Signed(copies.bytes)});
  corners.From(copies.copy_begin);
  corners.To(kCopies, copies.copy_end);
}

void StepTrace::AddLink(const TracedStep& step, int lane, size_t moe_layer, int64_t shift_ns,
                        const LayerTimes& times) {
  if (times.begin_ns == 0) return;
  const LayerStamps& at = stamps(step, lane, moe_layer);
  Corners corners(*links_[static_cast<size_t>(lane)], 0,
                  {Signed(step.step), moe_layers_[moe_layer], lane});
  corners.From(at.submit + shift_ns);
  corners.To(kToExperts, times.begin_ns);
  corners.To(kAtExperts, times.reply_ns);
  corners.To(kFromExperts, at.done + shift_ns);
}

}  // namespace tandem::gpu
