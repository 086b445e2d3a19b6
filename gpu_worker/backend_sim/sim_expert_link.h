#pragma once

// The experts' side of a simulated machine: another ExpertLink (the in-process one over a small
// RoutedExperts) computes the sums, and each submission lasts as long as the described cores would
// need for the described experts:
//
//   immediate part = submission overhead + max(distinct experts * bytes / bandwidth,
//                                              picks * operations / peak)
//   deferred part  = the same of the deferred picks, without the overhead, after the answer
//
// Which picks are of which part the expert worker decides (batch_groups.h). Of the bandwidth,
// copies of experts to the device take their part (SimPcie::HostReadGbps).
//
// Rows and sums cross PCIe at the big model's width (rows BF16, sums F32), within the ops of the
// compute stream that call Submit and Wait. Submissions of all lanes are taken up in their order by
// one team. In wall mode the team is the timeline's experts' thread.
//
// Thread safety: as ExpertLink with threads() == 1, called by the device's compute stream; Begin-
// and EndStep by the host. Ownership: borrows device and `inner`, which nobody else uses.
// Errors: those of `inner`.

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "expert_worker/engine/batch_groups.h"
#include "gpu_worker/backend_sim/sim_device.h"
#include "gpu_worker/expert_link.h"

namespace tandem::gpu {

class SimExpertLink final : public ExpertLink {
 public:
  // REQUIRES: inner.threads() == 1.
  SimExpertLink(SimDevice& device, ExpertLink& inner);
  ~SimExpertLink() override;

  const shm::BatchLimits& limits() const override { return inner_.limits(); }
  bool overlaps() const override { return true; }
  int threads() const override { return 1; }
  void BeginStep(uint64_t step) override;
  void Submit(const Submission& submission, int thread, int threads) override;
  void Wait(const Collection& collection, int thread, int threads) override;
  absl::Status EndStep() override { return inner_.EndStep(); }
  LinkError error() const override { return inner_.error(); }
  bool broken() const override { return inner_.broken(); }
  uint64_t ticks() const override { return inner_.ticks(); }
  // The timeline's times.
  LayerTimes layer_times(uint32_t lane, uint32_t layer) const override;

 private:
  struct Lane {
    std::mutex mutex;
    std::condition_variable changed;
    bool answered = false;
    int64_t answer_ns = 0;
  };
  struct StepTimes {
    uint64_t step = 0;
    LayerTimes times;
  };
  // On the experts' resource.
  void Compute(const Submission& submission, uint64_t step);
  // Of a part of a submission that is taken up at `begin_ns`.
  int64_t CostNs(const Submission& submission, expert::BatchGroups::Part part, int64_t begin_ns);
  int32_t RowsOf(const int32_t* rows, int32_t max_rows) const;

  SimDevice& device_;
  ExpertLink& inner_;
  std::vector<Lane> lanes_;
  std::vector<StepTimes> times_;  // [lanes, layers], complete before the answer shows
  expert::BatchGroups groups_;
  uint64_t begun_step_ = 0;   // host, and the compute stream during a step
  uint64_t active_step_ = 0;  // experts' resource
  int64_t idle_since_ns_ = 0;
};

}  // namespace tandem::gpu
