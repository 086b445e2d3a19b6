// Several expert workers as one ExpertLink: a submission goes to all of them, and Wait sums their
// partial sums in worker order, always the same, so that results do not depend on who answers
// first.
//
// The first error of any link is the error of the set; EndStep ends every link and reports the
// first failing worker by its index. After a worker's restart its link is replaced between steps.
#pragma once

#include <memory>
#include <vector>

#include "gpu_worker/expert_link.h"

namespace tandem::gpu {

class ExpertLinkSet final : public ExpertLink {
 public:
  // REQUIRES: at least one link; all have the same threads and limits.
  explicit ExpertLinkSet(std::vector<std::unique_ptr<ExpertLink>> links);

  const shm::BatchLimits& limits() const override { return links_[0]->limits(); }
  bool overlaps() const override { return links_[0]->overlaps(); }
  int threads() const override { return links_[0]->threads(); }
  void BeginStep(uint64_t step) override;
  void Submit(const Submission& submission, int thread, int threads) override;
  void Release(int thread) override;
  void Wait(const Collection& collection, int thread, int threads) override;
  absl::Status EndStep() override;
  LinkError error() const override;
  bool broken() const override;
  uint64_t ticks() const override;
  LayerTimes layer_times(uint32_t lane, uint32_t layer) const override;

  int size() const { return static_cast<int>(links_.size()); }
  const ExpertLink& link(int index) const { return *links_[index]; }
  // REQUIRES: no step is active; same threads and limits.
  void Replace(int index, std::unique_ptr<ExpertLink> link);

 private:
  std::vector<std::unique_ptr<ExpertLink>> links_;
};

}  // namespace tandem::gpu
