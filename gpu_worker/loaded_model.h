#pragma once

// A model that is ready to run steps, and everything it stands on: backend, weights, KV cache,
// routed experts (expert workers or in-process) and the step runner.
//
// Thread safety: Create, Run, Reset and the destructor belong to one thread (the backend's caller);
// ready(), progress() and the counters may be read by any. Errors of Create: DATA_LOSS or
// INVALID_ARGUMENT naming file, tensor or option, RESOURCE_EXHAUSTED, the expert workers' own.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/trace.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model_spec.h"
#include "common/shm/thread_pairs.h"
#include "expert_worker/kernels/kernel_table.h"
#include "gpu_worker/backend_cpu/cpu_backend.h"
#include "gpu_worker/expert_workers.h"
#include "gpu_worker/hot_experts/hot_experts.h"
#include "gpu_worker/hot_experts/store_experts.h"
#include "gpu_worker/inprocess_experts.h"
#include "gpu_worker/kv_cache.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/step_runner.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

struct WorkerOptions {
  const kernels::KernelTable* kernels = nullptr;
  int threads = 1;
  std::vector<int> cpus;  // one a thread, or empty: not pinned
  bool parity = false;
  bool inprocess_experts = false;
  std::vector<std::string> expert_addresses;
  std::vector<uint32_t> expert_shares;  // of the workers, or of the in-process engines
  shm::Placement placement = shm::Placement::kAuto;
  int max_step_rows = 512;
  int max_sequences = 16;
  int max_context = 0;          // 0: the model's
  int64_t kv_cache_tokens = 0;  // 0: a quarter of what is free, bounded by what sequences can use
  int block_tokens = 16;
  int max_logprobs = 20;
  uint64_t hot_experts_bytes = 0;  // of device memory; 0: all experts stay on the workers
  bool stream_prompts = false;     // experts of long prompts pass through the device
  std::string state_dir;           // keeps what hot experts were; empty: nothing is kept
  PipelineOptions pipeline;
  uint64_t epoch = 1;
  Tracer* tracer = nullptr;  // null: no timeline
};

struct HotExpertCounters {
  uint64_t picks = 0;  // of steps that ended well
  uint64_t hits = 0;   // of these, of resident experts
  HotExperts::Counters copies;
};

// What is being loaded; written by Create, read by any thread.
class LoadProgress {
 public:
  struct Snapshot {
    std::string phase;
    uint64_t loaded_bytes = 0;
    uint64_t total_bytes = 0;
  };

  void SetPhase(const char* phase) { phase_.store(phase, std::memory_order_relaxed); }
  void AddTotal(uint64_t bytes) { total_.fetch_add(bytes, std::memory_order_relaxed); }
  void SetDense(uint64_t bytes) { dense_.store(bytes, std::memory_order_relaxed); }
  void SetExperts(ExpertWorkers* workers);
  // Makes a load end early with CANCELLED. Any thread.
  void Cancel();
  bool cancelled() const { return engine_.cancel.load(std::memory_order_relaxed); }
  // Before another load.
  void Reset();
  expert::LoadProgress& engine() { return engine_; }
  Snapshot Read() const;

 private:
  std::atomic<const char*> phase_{"dense"};
  std::atomic<uint64_t> total_{0};
  std::atomic<uint64_t> dense_{0};
  expert::LoadProgress engine_;  // in-process experts
  mutable std::mutex mutex_;
  ExpertWorkers* workers_ = nullptr;
};

class LoadedModel {
 public:
  // `cancelled` is asked between parts.
  static absl::StatusOr<std::unique_ptr<LoadedModel>> Create(const std::string& dir,
                                                             const WorkerOptions& options,
                                                             LoadProgress& progress);
  ~LoadedModel();

  const worker::v1::ModelInfo& info() const { return info_; }
  void Run(const worker::v1::Step& step, worker::v1::StepResult& result);
  void Reset() { runner_->Reset(); }

  // Steps can run: every expert worker is attached.
  bool ready() const { return workers_ == nullptr || workers_->ready(); }
  // Grows while a step runs.
  uint64_t progress() const;
  uint64_t reattachments() const { return workers_ == nullptr ? 0 : workers_->reattachments(); }
  uint64_t kv_bytes() const { return cache_.bytes(); }
  const StepPipeline& pipeline() const { return runner_->pipeline(); }
  HotExpertCounters hot_experts() const;
  uint64_t activation_bytes() const { return runner_->decoder().activations().bytes; }
  // Ends waiting for expert workers; any thread.
  void Stop();

 private:
  LoadedModel() = default;
  absl::Status LoadDense(const WorkerOptions& options, LoadProgress& progress);
  absl::Status MakeRunner(const WorkerOptions& options);
  absl::Status MakeWeightSource(const WorkerOptions& options);
  absl::Status MakeHotExperts(const WorkerOptions& options);
  // That the workers have handed over what hot experts are copied from.
  absl::Status CheckWeightSource(const WorkerOptions& options) const;
  void SetWeightHandlers(ExpertWorkersOptions& workers);
  absl::Status LoadExperts(const WorkerOptions& options, LoadProgress& progress);
  absl::Status AttachWorkers(const WorkerOptions& options, LoadProgress& progress);
  absl::Status WarmUp();
  void FillInfo(const WorkerOptions& options);

  std::unique_ptr<Checkpoint> checkpoint_;  // dropped once loaded
  ModelSpec spec_;
  uint64_t model_hash_ = 0;
  std::unique_ptr<CpuBackend> backend_;
  ModelWeights weights_;
  KvCache cache_;
  std::unique_ptr<StoreExperts> weight_source_;  // null without hot experts
  std::unique_ptr<ExpertWorkers> workers_;
  std::unique_ptr<InProcessExperts> inprocess_;
  std::unique_ptr<HotExperts> hot_;
  std::unique_ptr<StepRunner> runner_;
  worker::v1::ModelInfo info_;
};

}  // namespace tandem::gpu
