#pragma once

// An ExpertLink that forwards to another until a chosen call, and is dead from then on, as a link
// is whose expert worker was killed: Submit does nothing, Wait stores zeros, the step ends
// UNAVAILABLE. Calls are counted per thread, so all threads die at the same call.
//
// Thread safety: as ExpertLink; arm and heal between steps. Ownership: borrows the other link.

#include <atomic>
#include <cstdint>
#include <vector>

#include "gpu_worker/expert_link.h"

namespace tandem::gpu {

class FaultyExpertLink final : public ExpertLink {
 public:
  static constexpr int64_t kNever = -1;

  explicit FaultyExpertLink(ExpertLink& link)
      : link_(link), calls_(static_cast<size_t>(link.threads())) {}

  // Dies in call number `call` (from 0) of the next step; Submit and Wait count alike.
  void DieAt(int64_t call) {
    die_at_ = call;
    dead_ = false;
  }
  // A new worker is there.
  void Heal() { DieAt(kNever); }
  // Of the last step, by one thread.
  int64_t calls() const { return calls_[0].count; }

  const shm::BatchLimits& limits() const override { return link_.limits(); }
  bool overlaps() const override { return link_.overlaps(); }
  int threads() const override { return link_.threads(); }
  void BeginStep(uint64_t step) override {
    for (Calls& calls : calls_) calls.count = 0;
    link_.BeginStep(step);
  }
  void Submit(const Submission& submission, int thread, int threads) override {
    if (Dies(thread)) return;
    link_.Submit(submission, thread, threads);
  }
  void Wait(const Collection& collection, int thread, int threads) override {
    if (!Dies(thread)) {
      link_.Wait(collection, thread, threads);
    } else if (collection.gather == Gather::kStore && thread == 0) {
      const auto elements = static_cast<size_t>(*collection.rows) * limits().hidden;
      for (size_t i = 0; i < elements; ++i) collection.out[i] = 0;
    }
  }
  absl::Status EndStep() override {
    const absl::Status status = link_.EndStep();
    return dead_ ? LinkStatus(LinkError::kPeerDied) : status;
  }
  LinkError error() const override { return dead_ ? LinkError::kPeerDied : link_.error(); }
  bool broken() const override { return dead_ || link_.broken(); }
  LayerTimes layer_times(uint32_t lane, uint32_t layer) const override {
    return link_.layer_times(lane, layer);
  }

 private:
  struct alignas(64) Calls {
    int64_t count = 0;
  };

  bool Dies(int thread) {
    const int64_t call = calls_[static_cast<size_t>(thread)].count++;
    if (die_at_ == kNever || call < die_at_) return false;
    dead_ = true;
    return true;
  }

  ExpertLink& link_;
  std::vector<Calls> calls_;
  int64_t die_at_ = kNever;
  std::atomic<bool> dead_{false};
};

}  // namespace tandem::gpu
