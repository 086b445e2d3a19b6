#pragma once

// The metrics registry of an expert worker: its families are read from the worker at each scrape,
// so nothing on the data plane counts for them. Thread-safe. The worker must outlive it.

#include <prometheus/registry.h>

#include <vector>

#include "expert_worker/expert_worker.h"

namespace tandem::expert {

class WorkerRegistry final : public prometheus::Registry {
 public:
  explicit WorkerRegistry(const ExpertWorker* worker) : worker_(worker) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const ExpertWorker* const worker_;
};

}  // namespace tandem::expert
