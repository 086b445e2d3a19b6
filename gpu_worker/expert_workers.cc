#include "gpu_worker/expert_workers.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gpu_worker/expert_worker_client.h"

namespace tandem::gpu {
namespace {

// How often links are looked at: a lost worker's link knows within 200 ms at the latest.
constexpr std::chrono::milliseconds kWatchInterval{100};
constexpr std::chrono::milliseconds kMaxBackOff{2000};
// A worker that restarts is back within seconds; a longer wait is a new attempt.
constexpr std::chrono::milliseconds kReconnectTimeout{2000};

}  // namespace

ExpertWorkers::ExpertWorkers(const ExpertWorkersOptions& options) : options_(options) {
  TANDEM_CHECK(!options.addresses.empty());
  TANDEM_CHECK(options.shares.size() == options.addresses.size());
  for (const std::string& address : options.addresses) {
    clients_.push_back(std::make_unique<ExpertWorkerClient>(address));
  }
}

ExpertWorkers::~ExpertWorkers() { Stop(); }

void ExpertWorkers::Stop() {
  std::thread watcher;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    watcher = std::move(watcher_);
  }
  wake_.notify_all();
  for (const auto& client : clients_) client->Cancel();
  if (watcher.joinable()) watcher.join();
}

absl::Status ExpertWorkers::Load(const std::string& model_dir) {
  model_dir_ = model_dir;
  std::vector<absl::Status> results(clients_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < clients_.size(); ++i) {
    threads.emplace_back([&, i] {
      results[i] = clients_[i]->Load({.model_dir = model_dir,
                                      .index = static_cast<uint32_t>(i),
                                      .shares = options_.shares,
                                      .connect_timeout = options_.connect_timeout});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::Status ExpertWorkers::Attach(const shm::BatchLimits& limits, uint64_t model_hash) {
  TANDEM_CHECK(links_ == nullptr);
  limits_ = limits;
  model_hash_ = model_hash;
  std::vector<std::unique_ptr<ExpertLink>> links;
  for (size_t i = 0; i < clients_.size(); ++i) {
    ASSIGN_OR_RETURN(links.emplace_back(), AttachOne(i));
  }
  const std::lock_guard lock(mutex_);
  if (stopped_) return absl::CancelledError("stopping");
  links_ = std::make_unique<ExpertLinkSet>(std::move(links));
  replacements_.resize(clients_.size());
  watcher_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ExpertLink>> ExpertWorkers::AttachOne(size_t index) {
  shm::UniqueFd weights;
  ASSIGN_OR_RETURN(std::unique_ptr<ExpertLink> link,
                   clients_[index]->Attach({.limits = limits_,
                                            .model_hash = model_hash_,
                                            .thread_cpus = options_.thread_cpus,
                                            .placement = options_.placement,
                                            .link_deadline = options_.link_deadline,
                                            .weights = options_.on_weights ? &weights : nullptr}));
  if (options_.on_weights) options_.on_weights(index, std::move(weights));
  return link;
}

void ExpertWorkers::TakeReplacements() {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < replacements_.size(); ++i) {
    if (replacements_[i] == nullptr || replacements_[i]->broken()) continue;
    links_->Replace(static_cast<int>(i), std::move(replacements_[i]));
  }
}

bool ExpertWorkers::NeedsRepair(size_t index) const {
  const std::lock_guard lock(mutex_);
  if (replacements_[index] != nullptr) return replacements_[index]->broken();
  return links_->link(static_cast<int>(index)).broken();
}

bool ExpertWorkers::ready() const {
  {
    const std::lock_guard lock(mutex_);
    if (links_ == nullptr || stopped_) return false;
  }
  for (size_t i = 0; i < clients_.size(); ++i) {
    if (NeedsRepair(i)) return false;
  }
  return true;
}

uint64_t ExpertWorkers::ticks() const {
  const std::lock_guard lock(mutex_);
  return links_ == nullptr ? 0 : links_->ticks();
}

uint64_t ExpertWorkers::loaded_bytes() const {
  uint64_t sum = 0;
  for (const auto& client : clients_) sum += client->loaded_bytes();
  return sum;
}

uint64_t ExpertWorkers::total_bytes() const {
  uint64_t sum = 0;
  for (const auto& client : clients_) sum += client->total_bytes();
  return sum;
}

void ExpertWorkers::Watch() {
  std::chrono::milliseconds pause = kWatchInterval;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (wake_.wait_for(lock, pause, [this] { return stopped_; })) return;
    }
    bool all = true;
    for (size_t i = 0; i < clients_.size(); ++i) all = Repair(i) && all;
    pause = all ? kWatchInterval : std::min(2 * pause, kMaxBackOff);
  }
}

bool ExpertWorkers::Repair(size_t index) {
  if (!NeedsRepair(index)) return true;
  ExpertWorkerClient& client = *clients_[index];
  LogWarn("expert_worker_lost", {{"address", client.address()}});
  if (options_.on_lost) options_.on_lost(index);
  absl::Status status = client.Load({.model_dir = model_dir_,
                                     .index = static_cast<uint32_t>(index),
                                     .shares = options_.shares,
                                     .connect_timeout = kReconnectTimeout});
  if (status.ok()) {
    auto link = AttachOne(index);
    status = link.status();
    if (link.ok()) {
      const std::lock_guard lock(mutex_);
      replacements_[index] = *std::move(link);
    }
  }
  if (!status.ok()) {
    LogWarn("expert_worker_attach_failed", {{"reason", status.ToString()}});
    return false;
  }
  reattachments_.fetch_add(1, std::memory_order_relaxed);
  LogInfo("expert_worker_attached_again", {{"address", client.address()}});
  return true;
}

}  // namespace tandem::gpu
