#pragma once

// The metrics registry of the gpu worker: its families are read from the engine at each scrape, so
// nothing between a step and its result counts for them. Thread-safe. The engine must outlive it.

#include <prometheus/registry.h>

#include <vector>

#include "gpu_worker/engine.h"

namespace tandem::gpu {

class GpuRegistry final : public prometheus::Registry {
 public:
  explicit GpuRegistry(const GpuEngine* engine) : engine_(engine) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const GpuEngine* const engine_;
};

}  // namespace tandem::gpu
