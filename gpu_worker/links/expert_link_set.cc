#include "gpu_worker/links/expert_link_set.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/status.h"

namespace tandem::gpu {

ExpertLinkSet::ExpertLinkSet(std::vector<std::unique_ptr<ExpertLink>> links)
    : links_(std::move(links)) {
  TANDEM_CHECK(!links_.empty());
  for (const auto& link : links_) TANDEM_CHECK(link->threads() == links_[0]->threads());
}

void ExpertLinkSet::BeginStep(uint64_t step) {
  for (const auto& link : links_) link->BeginStep(step);
}

void ExpertLinkSet::Submit(const Submission& submission, int thread, int threads) {
  for (const auto& link : links_) link->Submit(submission, thread, threads);
}

void ExpertLinkSet::Release(int thread) {
  for (const auto& link : links_) link->Release(thread);
}

void ExpertLinkSet::Wait(const Collection& collection, int thread, int threads) {
  Release(thread);  // no worker waits for another one's answer
  Collection next = collection;
  for (const auto& link : links_) {
    link->Wait(next, thread, threads);
    next.gather = Gather::kAdd;
  }
}

absl::Status ExpertLinkSet::EndStep() {
  absl::Status first;
  for (size_t i = 0; i < links_.size(); ++i) {
    const absl::Status status = links_[i]->EndStep();
    if (first.ok() && !status.ok()) first = Annotate(status, "expert worker " + std::to_string(i));
  }
  return first;
}

LinkError ExpertLinkSet::error() const {
  for (const auto& link : links_) {
    const LinkError error = link->error();
    if (error != LinkError::kNone) return error;
  }
  return LinkError::kNone;
}

bool ExpertLinkSet::broken() const {
  for (const auto& link : links_) {
    if (link->broken()) return true;
  }
  return false;
}

uint64_t ExpertLinkSet::ticks() const {
  uint64_t sum = 0;
  for (const auto& link : links_) sum += link->ticks();
  return sum;
}

LayerTimes ExpertLinkSet::layer_times(uint32_t lane, uint32_t layer) const {
  LayerTimes all = links_[0]->layer_times(lane, layer);
  for (const auto& link : links_) {
    const LayerTimes times = link->layer_times(lane, layer);
    all.begin_ns = std::min(all.begin_ns, times.begin_ns);
    all.reply_ns = std::max(all.reply_ns, times.reply_ns);
    all.end_ns = std::max(all.end_ns, times.end_ns);
  }
  return all;
}

void ExpertLinkSet::Replace(int index, std::unique_ptr<ExpertLink> link) {
  TANDEM_CHECK(link->threads() == threads());
  links_[static_cast<size_t>(index)] = std::move(link);
}

}  // namespace tandem::gpu
