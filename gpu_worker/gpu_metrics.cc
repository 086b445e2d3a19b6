#include "gpu_worker/gpu_metrics.h"

#include <string>
#include <string_view>
#include <utility>

#include "common/hw/cpu_features.h"

namespace tandem::gpu {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

class FamilyList {
 public:
  explicit FamilyList(std::vector<MetricFamily>& families) : families_(families) {}

  void Gauge(std::string_view name, std::string_view help, double value,
             std::vector<ClientMetric::Label> labels = {}) {
    ClientMetric metric;
    metric.gauge.value = value;
    Add(name, help, MetricType::Gauge, std::move(metric), std::move(labels));
  }
  void Counter(std::string_view name, std::string_view help, double value) {
    ClientMetric metric;
    metric.counter.value = value;
    Add(name, help, MetricType::Counter, std::move(metric), {});
  }

 private:
  void Add(std::string_view name, std::string_view help, MetricType type, ClientMetric metric,
           std::vector<ClientMetric::Label> labels) {
    metric.label = std::move(labels);
    MetricFamily family;
    family.name = "tandem_gpu_worker_" + std::string(name);
    family.help = std::string(help);
    family.type = type;
    family.metric.push_back(std::move(metric));
    families_.push_back(std::move(family));
  }

  std::vector<MetricFamily>& families_;
};

}  // namespace

std::vector<MetricFamily> GpuRegistry::Collect() const {
  std::vector<MetricFamily> families = prometheus::Registry::Collect();
  const GpuEngine::State state = engine_->state();
  const GpuEngine::Counters counters = engine_->counters();
  const WorkerOptions& options = engine_->options();
  FamilyList list(families);
  list.Gauge("ready", "1 when a model is loaded and every expert worker is attached",
             state.ready ? 1 : 0);
  list.Gauge("load_bytes", "Checkpoint bytes loaded so far, expert workers included",
             static_cast<double>(state.progress.loaded_bytes));
  list.Gauge("load_total_bytes", "Checkpoint bytes to load, expert workers included",
             static_cast<double>(state.progress.total_bytes));
  list.Gauge("kv_cache_bytes", "Bytes of the key/value cache",
             static_cast<double>(counters.kv_bytes));
  list.Gauge("activation_bytes", "Bytes of the buffers of the largest step",
             static_cast<double>(counters.activation_bytes));
  list.Gauge("threads", "Threads of the backend, by kernel table", options.threads,
             {{"isa", std::string(IsaName(options.kernels->isa))}});
  list.Counter("steps_total", "Steps answered", static_cast<double>(counters.steps));
  list.Counter("failed_steps_total", "Steps answered with another outcome than OK",
               static_cast<double>(counters.failed_steps));
  list.Counter("rows_total", "Token rows computed", static_cast<double>(counters.rows));
  list.Counter("step_seconds_total", "Time from a step's start to its result",
               static_cast<double>(counters.step_us) * 1e-6);
  list.Counter("expert_wait_seconds_total",
               "Part of it that went to handing rows to experts and waiting for them",
               static_cast<double>(counters.expert_wait_us) * 1e-6);
  list.Counter("expert_reattachments_total", "Links to expert workers made anew after a loss",
               static_cast<double>(counters.reattachments));
  return families;
}

}  // namespace tandem::gpu
