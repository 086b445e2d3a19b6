#pragma once

// The expert workers behind shared-memory links: loads them, attaches to them, and attaches again
// after one was lost. The links form one ExpertLink for the steps.
//
//   ExpertWorkers workers(options);
//   workers.Load(dir, &progress);                     // every worker in parallel
//   workers.Attach(limits, model_hash);               // link() is valid from here on
//   ... before each step: workers.TakeReplacements();
//
// A background thread watches the links. When one is broken it has the worker load again (which
// ends at once where the weights survived in the supervisor's store), attaches, and keeps the new
// link until the step thread takes it between two steps. It tries again with back-off from 100 ms
// to 2 s.
//
// Thread safety: Load, Attach and TakeReplacements by the step thread; ready(), ticks(),
// loaded_bytes() and Stop() by any. Errors: those of the workers, naming their address.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/expert_batch.h"
#include "common/shm/thread_pairs.h"
#include "common/shm/unique_fd.h"
#include "gpu_worker/expert_link.h"
#include "gpu_worker/links/expert_link_set.h"

namespace tandem::gpu {

class ExpertWorkerClient;

struct ExpertWorkersOptions {
  std::vector<std::string> addresses;
  std::vector<uint32_t> shares;  // one a worker
  std::vector<int> thread_cpus;  // of the pool, -1: not pinned
  shm::Placement placement = shm::Placement::kAuto;
  // For a worker that is still starting.
  std::chrono::milliseconds connect_timeout{30000};
  std::chrono::milliseconds link_deadline{1500};
  // Told whenever a worker has handed over the descriptor of its weight store (invalid: it has
  // none), and when it is lost. Called by the thread that attaches, or the background one. Null:
  // weights are not asked for.
  std::function<void(size_t worker, shm::UniqueFd fd)> on_weights;
  std::function<void(size_t worker)> on_lost;
};

class ExpertWorkers {
 public:
  explicit ExpertWorkers(const ExpertWorkersOptions& options);
  ~ExpertWorkers();
  ExpertWorkers(const ExpertWorkers&) = delete;
  ExpertWorkers& operator=(const ExpertWorkers&) = delete;

  // Returns when all are loaded, or with the first error.
  absl::Status Load(const std::string& model_dir);
  absl::Status Attach(const shm::BatchLimits& limits, uint64_t model_hash);
  ExpertLink* link() { return links_.get(); }
  // Puts new links in the place of broken ones. REQUIRES: no step is active.
  void TakeReplacements();
  // Cancels what is in progress and ends the background thread.
  void Stop();

  // Every link works, or its replacement waits to be taken.
  bool ready() const;
  uint64_t ticks() const;
  uint64_t loaded_bytes() const;
  uint64_t total_bytes() const;
  uint64_t reattachments() const { return reattachments_.load(std::memory_order_relaxed); }

 private:
  void Watch();
  // Repairs one link if it is broken; returns false when that failed.
  bool Repair(size_t index);
  bool NeedsRepair(size_t index) const;
  absl::StatusOr<std::unique_ptr<ExpertLink>> AttachOne(size_t index);

  const ExpertWorkersOptions options_;
  std::string model_dir_;
  shm::BatchLimits limits_;
  uint64_t model_hash_ = 0;
  std::vector<std::unique_ptr<ExpertWorkerClient>> clients_;
  std::atomic<uint64_t> reattachments_{0};

  mutable std::mutex mutex_;  // links_' replacement, replacements_, stopped_
  std::condition_variable wake_;
  std::unique_ptr<ExpertLinkSet> links_;
  std::vector<std::unique_ptr<ExpertLink>> replacements_;
  bool stopped_ = false;
  std::thread watcher_;
};

}  // namespace tandem::gpu
