#include "expert_worker/worker_metrics.h"

#include <string>

#include "common/base/metrics.h"
#include "common/hw/cpu_features.h"

namespace tandem::expert {
std::vector<prometheus::MetricFamily> WorkerRegistry::Collect() const {
  std::vector<prometheus::MetricFamily> families = prometheus::Registry::Collect();
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
  list.Gauge(
      "tandem_expert_worker_weights_sampled_pages",
      "Pages of packed experts whose NUMA node was looked up after loading; 0: none could be",
      static_cast<double>(info.weights_placement.pages));
  list.Gauge("tandem_expert_worker_weights_misplaced_pages",
             "Of the sampled pages those that lie on another NUMA node than this worker's",
             static_cast<double>(info.weights_placement.misplaced));
  list.Gauge("tandem_expert_worker_workspace_bytes",
             "Bytes of activations set aside for the link's largest batch",
             static_cast<double>(info.workspace_bytes));
  list.Gauge("tandem_expert_worker_threads", "Threads that compute experts, by kernel table",
             options.threads, {{"isa", options.kernels->name}});
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
