#include "gpu_worker/step_times.h"

#include <algorithm>

namespace tandem::gpu {
namespace {

// Differences of two clock readings that a broken peer or a clock without order cannot spoil.
int64_t Between(int64_t begin_ns, int64_t end_ns) {
  return std::max<int64_t>(end_ns - begin_ns, 0);
}

void AddDevice(const LayerStamps& stamps, StepTimes::Lane& lane, StepTimes& times) {
  const int64_t before = Between(stamps.begin, stamps.submit);
  const int64_t beside = Between(stamps.submitted, stamps.shared);
  times.before_ns += before;
  times.beside_ns += beside;
  times.handover_ns += Between(stamps.submit, stamps.submitted);
  times.device_stall_ns += Between(stamps.wait, stamps.done);
  lane.device_ns += before + beside;
}

}  // namespace

StepMeter::StepMeter(std::vector<int> moe_layers) {
  for (const int layer : moe_layers) stalls_.push_back({.layer = layer});
}

StepTimes StepMeter::Measure(const LayerStamps* stamps, const ExpertLink& link, int lanes) {
  StepTimes times;
  times.measured = true;
  const size_t layers = stalls_.size();
  int64_t free_ns = 0;  // the workers are done with all before
  for (size_t i = 0; i < layers; ++i) {
    for (size_t l = 0; l < static_cast<size_t>(lanes); ++l) {
      const LayerStamps& layer = stamps[l * layers + i];
      AddDevice(layer, times.lane[l], times);
      stalls_[i].device_ns += Between(layer.wait, layer.done);
      const LayerTimes experts =
          link.layer_times(static_cast<uint32_t>(l), static_cast<uint32_t>(stalls_[i].layer));
      if (experts.begin_ns == 0) continue;
      times.experts_ns += Between(experts.begin_ns, experts.reply_ns);
      times.deferred_ns += Between(experts.reply_ns, experts.end_ns);
      times.lane[l].experts_ns += Between(experts.begin_ns, experts.end_ns);
      const int64_t stall = free_ns == 0 ? 0 : Between(free_ns, experts.begin_ns);
      times.experts_stall_ns += stall;
      stalls_[i].experts_ns += stall;
      free_ns = experts.end_ns;
    }
  }
  return times;
}

}  // namespace tandem::gpu
