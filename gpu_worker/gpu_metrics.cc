#include "gpu_worker/gpu_metrics.h"

#include <string>

#include "common/base/metrics.h"
#include "common/hw/cpu_features.h"

namespace tandem::gpu {
namespace {

constexpr double kSeconds = 1e-9;  // of a ns

void AddPipeline(const GpuEngine::Counters& counters, FamilyList& list) {
  const PipelineCounters& pipeline = counters.pipeline;
  for (size_t i = 0; i < pipeline.steps.size(); ++i) {
    list.Counter("tandem_gpu_worker_pipeline_steps_total", "Steps by how they were pipelined",
                 static_cast<double>(pipeline.steps[i]),
                 {{"policy", StepPolicyName(static_cast<StepPolicy>(i))}});
  }
  list.Counter("tandem_gpu_worker_routed_rows_total",
               "Rows times layers whose picks may be deferred or resident",
               static_cast<double>(pipeline.routed_rows));
  list.Counter("tandem_gpu_worker_deferred_picks_total",
               "Experts of a row whose sums came a layer late",
               static_cast<double>(pipeline.deferred_picks));
  list.Counter("tandem_gpu_worker_deferred_mass_rows_total",
               "Share of router weight that was deferred, summed over the routed rows",
               pipeline.deferred_mass);
  list.Counter("tandem_gpu_worker_measured_steps_total", "Steps that the layer stalls are of",
               static_cast<double>(pipeline.measured_steps));
  const auto stalled = [&list](int layer, const char* side, int64_t ns) {
    list.Counter("tandem_gpu_worker_layer_stall_seconds_total",
                 "Time that a side waited for the other, by layer",
                 static_cast<double>(ns) * kSeconds,
                 {{"layer", std::to_string(layer)}, {"side", side}});
  };
  for (const StepMeter::LayerStall& stall : counters.stalls) {
    stalled(stall.layer, "device", stall.device_ns);
    stalled(stall.layer, "experts", stall.experts_ns);
  }
}

void AddHotExperts(const HotExpertCounters& hot, FamilyList& list) {
  list.Counter("tandem_gpu_worker_hot_expert_picks_total",
               "Router picks while hot experts are on, by row and layer",
               static_cast<double>(hot.picks));
  list.Counter("tandem_gpu_worker_hot_expert_hits_total",
               "Router picks that were computed by experts on the device",
               static_cast<double>(hot.hits));
  list.Counter("tandem_gpu_worker_hot_expert_migrations_total", "Experts copied to the device",
               static_cast<double>(hot.copies.migrations));
  list.Counter("tandem_gpu_worker_hot_expert_failed_copies_total",
               "Copies given up, as the weights could not be read",
               static_cast<double>(hot.copies.failed_copies));
  list.Counter("tandem_gpu_worker_streamed_experts_total",
               "Experts copied to the device for one prompt step",
               static_cast<double>(hot.copies.streamed_experts));
  list.Gauge("tandem_gpu_worker_hot_expert_bytes", "Device memory of the experts that lie there",
             static_cast<double>(hot.copies.resident_bytes));
  list.Gauge("tandem_gpu_worker_hot_expert_capacity_bytes",
             "Device memory for hot experts; 0: there are none",
             static_cast<double>(hot.copies.capacity_bytes));
}

}  // namespace

std::vector<prometheus::MetricFamily> GpuRegistry::Collect() const {
  std::vector<prometheus::MetricFamily> families = prometheus::Registry::Collect();
  const GpuEngine::State state = engine_->state();
  const GpuEngine::Counters counters = engine_->counters();
  const WorkerOptions& options = engine_->options();
  FamilyList list(&families);
  list.Gauge("tandem_gpu_worker_ready_workers",
             "1 when a model is loaded and every expert worker is attached", state.ready ? 1 : 0);
  list.Gauge("tandem_gpu_worker_load_bytes",
             "Checkpoint bytes loaded so far, expert workers included",
             static_cast<double>(state.progress.loaded_bytes));
  list.Gauge("tandem_gpu_worker_load_total_bytes",
             "Checkpoint bytes to load, expert workers included",
             static_cast<double>(state.progress.total_bytes));
  list.Gauge("tandem_gpu_worker_kv_cache_bytes", "Bytes of the key/value cache",
             static_cast<double>(counters.kv_bytes));
  list.Gauge("tandem_gpu_worker_activation_bytes", "Bytes of the buffers of the largest step",
             static_cast<double>(counters.activation_bytes));
  list.Gauge("tandem_gpu_worker_threads", "Threads of the backend, by kernel table",
             options.threads, {{"isa", options.kernels->name}});
  list.Counter("tandem_gpu_worker_steps_total", "Steps answered",
               static_cast<double>(counters.steps));
  list.Counter("tandem_gpu_worker_failed_steps_total",
               "Steps answered with another outcome than OK",
               static_cast<double>(counters.failed_steps));
  list.Counter("tandem_gpu_worker_rows_total", "Token rows computed",
               static_cast<double>(counters.rows));
  list.Counter("tandem_gpu_worker_step_seconds_total", "Time from a step's start to its result",
               static_cast<double>(counters.step_us) * 1e-6);
  list.Counter("tandem_gpu_worker_expert_wait_seconds_total",
               "Part of it that went to handing rows to experts and waiting for them",
               static_cast<double>(counters.expert_wait_us) * 1e-6);
  AddPipeline(counters, list);
  AddHotExperts(counters.hot_experts, list);
  list.Counter("tandem_gpu_worker_expert_reattachments_total",
               "Links to expert workers made anew after a loss",
               static_cast<double>(counters.reattachments));
  return families;
}

}  // namespace tandem::gpu
