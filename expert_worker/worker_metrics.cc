#include "expert_worker/worker_metrics.h"

#include <string>
#include <string_view>
#include <utility>

#include "common/hw/cpu_features.h"

namespace tandem::expert {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

class FamilyList {
 public:
  explicit FamilyList(std::vector<MetricFamily>* families) : families_(families) {}

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
    family.name = std::string(name);
    family.help = std::string(help);
    family.type = type;
    family.metric.push_back(std::move(metric));
    families_->push_back(std::move(family));
  }

  std::vector<MetricFamily>* families_;
};

}  // namespace

std::vector<MetricFamily> WorkerRegistry::Collect() const {
  std::vector<MetricFamily> families = prometheus::Registry::Collect();
  const ExpertWorker::Info info = worker_->info();
  const ExpertWorker::Options& options = worker_->options();
  FamilyList list(&families);
  list.Gauge("tandem_expert_worker_ready_workers",
             "1 when experts are loaded and links are accepted",
             info.phase == ExpertWorker::Phase::kReady && !info.draining ? 1 : 0);
  list.Gauge("tandem_expert_worker_loaded_bytes", "Packed bytes loaded so far",
             static_cast<double>(info.loaded_bytes));
  list.Gauge("tandem_expert_worker_share_bytes", "Packed bytes of this worker's share",
             static_cast<double>(info.total_bytes));
  list.Gauge("tandem_expert_worker_kept_bytes",
             "Bytes of packed experts that a former process had left in the store",
             info.reattached ? static_cast<double>(info.weights_bytes) : 0);
  list.Gauge("tandem_expert_worker_weights_bytes", "Bytes of packed experts, by kind of pages",
             static_cast<double>(info.weights_bytes),
             {{"pages", std::string(PageKindName(info.page_kind))}});
  list.Gauge("tandem_expert_worker_workspace_bytes",
             "Bytes of activations set aside for the link's largest batch",
             static_cast<double>(info.workspace_bytes));
  list.Gauge("tandem_expert_worker_threads", "Threads that compute experts, by kernel table",
             options.threads, {{"isa", std::string(IsaName(options.kernels->isa))}});
  list.Gauge("tandem_expert_worker_pinned_threads", "Threads that sit on the CPU they were given",
             info.pinned_threads);
  list.Gauge("tandem_expert_worker_attached_gpu_workers", "1 while a gpu worker is attached",
             info.link.attached ? 1 : 0);
  list.Counter("tandem_expert_worker_link_attachments_total", "Gpu workers attached since start",
               static_cast<double>(info.link.attachments));
  list.Counter("tandem_expert_worker_link_batches_total", "Batches computed since start",
               static_cast<double>(info.link.batches));
  list.Counter("tandem_expert_worker_link_refused_slots_total",
               "Submissions refused as malformed since start",
               static_cast<double>(info.link.refused_slots));
  return families;
}

}  // namespace tandem::expert
