#pragma once

// One expert worker without its RPC: loads (or re-attaches to) the packed experts, runs the block
// on a pinned pool behind the shared-memory link, and answers what state it is in.
//
//   idle -> loading -> ready            a failed load may be tried again
//
// Thread safety: all methods from any thread. Loading runs on a thread of its own and survives the
// caller that asked for it. Ownership: weights_fd stays the caller's; the kernel table must outlive
// the worker. Errors: Status; the messages are for the operator.

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/trace.h"
#include "common/hw/numa_placement.h"
#include "common/hw/pages.h"
#include "common/shm/expert_batch.h"
#include "common/shm/handover.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/pool.h"
#include "expert_worker/engine/routed_experts.h"
#include "expert_worker/engine/weight_store.h"
#include "expert_worker/link_loop.h"

namespace tandem::expert {

class ExpertWorker {
 public:
  struct Options {
    std::string link_socket;
    // Replaces the directory of every LoadRequest: containers mount models where they like.
    std::string model_dir;
    int weights_fd = -1;  // kept by a supervisor; -1: a memfd of our own, lost with the process
    HugePages huge_pages = HugePages::kAuto;  // of that memfd
    // Where packed experts are kept on disk (engine/packed_file.h); empty: they are packed from the
    // checkpoint at each start.
    std::string state_dir;
    bool map_weights = false;  // compute from the packed file as it is mapped, without a copy
    const kernels::KernelTable* kernels = nullptr;
    int threads = 1;
    std::vector<int> cpus;  // one a thread, or empty: not pinned
    int numa_node = -1;     // where the weights should lie; -1: where they are first written
    const NumaPolicy* numa_policy = nullptr;  // needed with numa_node
    shm::Placement placement = shm::Placement::kAuto;
    Tracer* tracer = nullptr;  // gets a track a thread; null: no timeline
  };

  struct LoadRequest {
    std::string model_dir;
    uint32_t index = 0;
    std::vector<uint32_t> shares;
    bool operator==(const LoadRequest&) const = default;
  };

  enum class Phase { kIdle, kLoading, kReady, kFailed };

  struct Info {
    Phase phase = Phase::kIdle;
    absl::Status error;  // of the last load, when it failed
    uint64_t loaded_bytes = 0;
    uint64_t total_bytes = 0;
    bool reattached = false;
    bool draining = false;
    uint64_t weights_bytes = 0;
    uint64_t workspace_bytes = 0;
    uint64_t model_hash = 0;
    PageKind page_kind = PageKind::kPlain;
    PlacementSample weights_placement;  // of the weights; no pages where it could not be seen
    int pinned_threads = 0;
    LinkLoop::State link;
  };

  struct AttachRequest {
    uint32_t max_rows = 0;
    uint32_t hidden = 0;
    uint32_t top_k = 0;
    uint32_t lanes = 1;
    shm::RowType row_type = shm::RowType::kBf16;
  };

  struct Attached {
    shm::LinkTicket ticket;
    uint64_t model_hash = 0;
  };

  explicit ExpertWorker(const Options& options);
  ~ExpertWorker();  // Stop
  ExpertWorker(const ExpertWorker&) = delete;
  ExpertWorker& operator=(const ExpertWorker&) = delete;

  // Starts loading, or joins a load of the same request that is in progress or done.
  // Errors: FAILED_PRECONDITION when another one is; INVALID_ARGUMENT.
  absl::Status StartLoad(LoadRequest request);
  // Returns at the latest after `timeout`, earlier when loading has ended.
  Info WaitForLoad(std::chrono::milliseconds timeout);
  // Errors: FAILED_PRECONDITION before a load has ended or for limits of another model; UNAVAILABLE
  // when draining; RESOURCE_EXHAUSTED for the segment or the workspace.
  absl::StatusOr<Attached> Attach(const AttachRequest& request);
  // Ends the link after the submission in progress; no Attach succeeds from then on.
  void Drain();
  // Cancels a load, ends link and threads. Idempotent.
  void Stop();

  Info info() const;
  const Options& options() const { return options_; }

 private:
  void LoadMain(const LoadRequest& request);
  absl::Status Load(const LoadRequest& request);
  absl::StatusOr<std::unique_ptr<WeightStore>> OpenStore(const StoreSpec& spec,
                                                         const ExpertTensors& tensors);
  absl::StatusOr<std::unique_ptr<WeightStore>> OpenKeptStore(const StoreSpec& spec,
                                                             const ExpertTensors& tensors);
  absl::StatusOr<std::unique_ptr<WeightStore>> FillStore(int fd, const StoreSpec& spec,
                                                         const ExpertTensors& tensors);
  absl::StatusOr<std::unique_ptr<WeightStore>> LoadPacked(int fd, const StoreSpec& spec,
                                                          const ExpertTensors& tensors);
  absl::Status CheckKeptPages(uint64_t bytes) const;
  LoadOptions HowToLoad() const { return {options_.threads, options_.huge_pages}; }
  void PreferNodeOf(int fd, uint64_t bytes) const;
  void CheckPlacement();
  absl::Status StartEngine();
  Info InfoLocked() const;

  const Options options_;
  LoadProgress progress_;
  std::thread loader_;
  std::thread compute_;  // thread 0 of the pool while the link loop runs

  mutable std::mutex mutex_;
  std::condition_variable load_ended_;
  Phase phase_ = Phase::kIdle;
  LoadRequest request_;
  absl::Status error_;
  bool reattached_ = false;
  bool draining_ = false;
  bool stopped_ = false;
  // Written by the loader before phase_ becomes kReady, constant afterwards.
  shm::UniqueFd own_fd_;
  PlacementSample weights_placement_;
  std::unique_ptr<WeightStore> store_;
  std::unique_ptr<RoutedExperts> experts_;
  std::unique_ptr<LinkLoop> loop_;
  std::atomic<int> pinned_threads_{0};
};

}  // namespace tandem::expert
