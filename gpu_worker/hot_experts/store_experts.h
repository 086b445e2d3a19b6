#pragma once

// Copies of experts out of packed weight stores: those of the in-process engines, or the sealed
// stores of expert workers, mapped read-only from descriptors that came with the link.
//
// A worker's store is dropped when the worker is lost, so that its memory can be freed (it may be
// loading again), and comes back with its new link. A copy in progress keeps what it reads.
//
// Thread safety: any thread. Ownership: stores are shared with the copy in progress; Read allocates
// nothing that `out` has room for. Errors: FAILED_PRECONDITION for a descriptor that is not the
// wanted store (another model, share or layout, or not sealed).

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "expert_worker/engine/store_manifest.h"
#include "expert_worker/engine/weight_store.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::gpu {

class StoreExperts final : public ExpertWeightSource {
 public:
  // What each worker's store must be, in worker order. REQUIRES: not empty.
  explicit StoreExperts(std::vector<expert::StoreSpec> specs);

  // All but the budget.
  ResidentShape Shape(int top_k) const;

  absl::Status Attach(size_t worker, int fd);
  void Set(size_t worker, std::shared_ptr<const expert::WeightStore> store);
  void Drop(size_t worker) { Set(worker, nullptr); }

  absl::Status Read(int layer, int expert, CanonicalExpert* out) override;
  bool available() const override { return available_.load(std::memory_order_relaxed); }
  // The first worker whose store is missing, of as many as there are if none is.
  size_t first_missing() const;

 private:
  using Stores = std::vector<std::shared_ptr<const expert::WeightStore>>;
  // What a copy holds on to: replaced as a whole, never changed.
  struct Snapshot {
    Stores held;
    std::vector<const expert::WeightStore*> stores;
    absl::Status status;  // of Read
  };
  static std::shared_ptr<const Snapshot> MakeSnapshot(Stores stores);
  std::shared_ptr<const Snapshot> snapshot() const;

  const std::vector<expert::StoreSpec> specs_;
  mutable std::mutex mutex_;  // of snapshot_
  std::shared_ptr<const Snapshot> snapshot_;
  std::atomic<bool> available_{false};
};

}  // namespace tandem::gpu
