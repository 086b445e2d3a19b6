#include "gpu_worker/hot_experts/hot_experts.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gpu_worker/hot_experts/counts_file.h"

namespace tandem::gpu {
namespace {

// Of a copy that is given up the layer and the expert alone are told.
constexpr TraceKind kCopy = {"copy expert", TraceRole::kBusy, {"layer", "expert", "bytes", "slot"}};
constexpr TraceKind kGivenUp = {"copy given up", TraceRole::kBusy, {"layer", "expert"}};

// One for an expert, one spare.
constexpr int kLeastSlots = 2;

// The copier takes what the cores have left: where it shares them with the pools, steps go first.
void LowerPriority() {
  constexpr int kLowest = 19;
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kLowest);
}

HotPolicy::Options WithShape(HotPolicy::Options options, const HotExpertsOptions& hot, int slots) {
  options.planner.layers = static_cast<int>(hot.moe_layers.size());
  options.planner.experts = hot.experts;
  options.planner.slots = slots;
  return options;
}

// Slots of the ring: a layer slot holds all experts of a layer, or what half of the slots allow.
int RingSlots(const HotExpertsOptions& options, int slots) {
  if (!options.stream_prompts) return 0;
  return ExpertStream::kRingLayers *
         std::min(options.experts, slots / 2 / ExpertStream::kRingLayers);
}

absl::Status TooSmallError(uint64_t budget_bytes, uint64_t slot_bytes) {
  constexpr double kGb = 1e9;
  // Rounded up to whole kilobytes, so that the figure that is named does hold one.
  const uint64_t least_bytes = (kLeastSlots * slot_bytes + 999) / 1000 * 1000;
  return absl::InvalidArgumentError(absl::StrFormat(
      "--hot-experts-gb=%.6f holds no hot expert: one takes %d bytes, and as much is "
      "kept spare to move experts by. At least --hot-experts-gb=%.6f is needed; 0 "
      "turns hot experts off",
      static_cast<double>(budget_bytes) / kGb, slot_bytes, static_cast<double>(least_bytes) / kGb));
}

}  // namespace

absl::StatusOr<std::unique_ptr<HotExperts>> HotExperts::Create(Backend& backend,
                                                               ResidentShape shape,
                                                               ExpertWeightSource& source,
                                                               const HotExpertsOptions& options) {
  const auto layers = static_cast<int>(options.moe_layers.size());
  // All experts, and slots to move them by; an id above would be the sentinel.
  const int most = layers * options.experts + options.policy.planner.max_in_flight;
  const int ring = options.stream_prompts ? ExpertStream::kRingLayers * options.experts : 0;
  shape.max_slots = std::min<int>(most + ring, kNoExpert - 1);
  ASSIGN_OR_RETURN(std::unique_ptr<ResidentExperts> experts, backend.MakeResidentExperts(shape));
  if (experts->slots() < kLeastSlots) {
    return TooSmallError(shape.budget_bytes, experts->slot_bytes());
  }
  std::unique_ptr<HotExperts> hot(new HotExperts(backend, source, options, std::move(experts)));
  RETURN_IF_ERROR(hot->MakeTable());
  RETURN_IF_ERROR(hot->MakeStream());
  hot->RestoreCounts();
  hot->copier_ = std::thread([raw = hot.get()] { raw->CopierMain(); });
  return hot;
}

HotExperts::HotExperts(Backend& backend, ExpertWeightSource& source,
                       const HotExpertsOptions& options, std::unique_ptr<ResidentExperts> experts)
    : backend_(backend),
      source_(source),
      options_(options),
      experts_(std::move(experts)),
      policy_(WithShape(options.policy, options,
                        experts_->slots() - RingSlots(options, experts_->slots()))),
      snapshot_({.layers = policy_.counts().layers(), .experts = options.experts}),
      track_(options.tracer == nullptr ? TraceTrack::None()
                                       : options.tracer->AddTrack("hot experts")) {
  const auto most = static_cast<size_t>(options.policy.planner.max_in_flight);
  planned_.reserve(most);
  taken_.reserve(most);
  queue_.reserve(most);
  done_.reserve(most);
}

HotExperts::~HotExperts() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  if (!copier_.joinable()) return;  // was never started
  copier_.join();
  SaveCounts(policy_.counts());
}

absl::Status HotExperts::MakeTable() {
  table_.assign(policy_.counts().values().size(), kNoExpert);
  table_dirty_.assign(options_.moe_layers.size(), 0);
  const size_t bytes = table_.size() * sizeof(uint16_t);
  ASSIGN_OR_RETURN(void* device, backend_.Allocate(bytes));
  backend_.CopyToDevice(device, table_.data(), bytes);
  residents_ = {.experts = experts_.get(), .slot_of_expert = static_cast<const uint16_t*>(device)};
  return backend_.Synchronize();
}

absl::Status HotExperts::MakeStream() {
  const int ring = RingSlots(options_, experts_->slots());
  if (ring == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(stream_, ExpertStream::Create(backend_, *experts_, source_,
                                                 {.experts = options_.experts,
                                                  .moe_layers = options_.moe_layers,
                                                  .first_slot = experts_->slots() - ring,
                                                  .layer_slots = ring / ExpertStream::kRingLayers,
                                                  .fixed = options_.fixed_streamed}));
  return absl::OkStatus();
}

ExpertStream* HotExperts::BeginStream(int rows) {
  // The workers compute what cannot be read.
  if (stream_ == nullptr || !source_.available()) return nullptr;
  if (!stream_->Begin(rows, table_, policy_.counts())) return nullptr;
  return stream_.get();
}

void HotExperts::ObserveStream(const StreamingTimes& times) {
  if (stream_ == nullptr) return;
  stream_->Observe(times);
  streamed_.fetch_add(static_cast<uint64_t>(stream_->streamed()) * options_.moe_layers.size(),
                      std::memory_order_relaxed);
}

void HotExperts::RestoreCounts() {
  if (options_.state_dir.empty()) return;
  const std::string path = CountsPath(options_.state_dir, options_.model_hash);
  const absl::Status status = LoadCounts(path, options_.model_hash, policy_.mutable_counts());
  if (status.ok()) {
    LogInfo("hot_experts_counts_restored", {{"file", path}});
    next_save_ = policy_.counts().steps() + kSaveSteps;
  } else if (!absl::IsNotFound(status)) {
    LogWarn("hot_experts_start_cold", {{"reason", status.ToString()}});
  }
}

void HotExperts::SaveCounts(const ExpertCounts& counts) const {
  if (options_.state_dir.empty()) return;
  const absl::Status status = gpu::SaveCounts(CountsPath(options_.state_dir, options_.model_hash),
                                              options_.model_hash, counts);
  if (!status.ok()) LogWarn("hot_experts_counts_not_saved", {{"reason", status.ToString()}});
}

void HotExperts::BeginStep() {
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    std::swap(taken_, done_);
  }
  for (const Copy& copy : taken_) Apply(copy);
  taken_.clear();
  const auto experts = static_cast<size_t>(options_.experts);
  for (size_t layer = 0; layer < table_dirty_.size(); ++layer) {
    if (std::exchange(table_dirty_[layer], uint8_t{0}) == 0) continue;
    // Stream-ordered before the step's ops; the steps before have ended.
    backend_.CopyToDevice(const_cast<uint16_t*>(residents_.slot_of_expert) + layer * experts,
                          table_.data() + layer * experts, experts * sizeof(uint16_t));
  }
}

void HotExperts::Apply(const Copy& copy) {
  const Migration& m = copy.migration;
  if (!copy.ok) {
    policy_.Cancel(m);
    paused_until_ = policy_.counts().steps() + kPauseSteps;
    failed_copies_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  policy_.Finish(m);
  SetSlot(m.layer, m.expert, static_cast<uint16_t>(m.slot));
  if (m.evicted_layer >= 0) SetSlot(m.evicted_layer, m.evicted_expert, kNoExpert);
  migrations_.fetch_add(1, std::memory_order_relaxed);
  resident_.store(static_cast<uint64_t>(policy_.planner().resident()), std::memory_order_relaxed);
}

void HotExperts::SetSlot(int moe_layer, int expert, uint16_t slot) {
  table_[static_cast<size_t>(moe_layer * options_.experts + expert)] = slot;
  table_dirty_[static_cast<size_t>(moe_layer)] = 1;
}

void HotExperts::EndStep() {
  policy_.EndStep();
  const uint64_t steps = policy_.counts().steps();
  if (steps >= paused_until_ && source_.available()) policy_.Plan(&planned_);
  const bool save = steps >= next_save_ && !options_.state_dir.empty();
  if (planned_.empty() && !save) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) HandOver(save);
}

// Behind the lock, and told behind it too: a copier that was told later could wake, and take the
// lock, after it had done all that was handed over.
void HotExperts::HandOver(bool save) {
  queue_.insert(queue_.end(), planned_.begin(), planned_.end());
  planned_.clear();
  if (save && !save_wanted_) {
    snapshot_.Assign(policy_.counts());
    save_wanted_ = true;
    next_save_ = policy_.counts().steps() + kSaveSteps;
  }
  wake_.notify_one();
}

void HotExperts::CopierMain() {
  pthread_setname_np(pthread_self(), "hot-experts");
  LowerPriority();
  CanonicalExpert expert;
  std::unique_lock lock(mutex_);
  while (true) {
    copier_waits_ = true;
    if (queue_.empty() && !save_wanted_) idle_.notify_all();
    wake_.wait(lock, [this] { return stopped_ || save_wanted_ || !queue_.empty(); });
    copier_waits_ = false;
    if (stopped_) return;
    if (!queue_.empty()) {
      const Migration migration = queue_.front();
      queue_.erase(queue_.begin());
      lock.unlock();
      const bool ok = CopyExpert(migration, &expert);
      lock.lock();
      done_.push_back({migration, ok});
    } else {
      lock.unlock();
      SaveCounts(snapshot_);  // the step thread leaves it alone while it is wanted
      lock.lock();
      save_wanted_ = false;
    }
  }
}

bool HotExperts::CopyExpert(const Migration& migration, CanonicalExpert* expert) {
  const int layer = options_.moe_layers[static_cast<size_t>(migration.layer)];
  const int64_t begin_ns = track_->on() ? TraceNowNs() : 0;
  absl::Status status = source_.Read(layer, migration.expert, expert);
  if (status.ok()) status = experts_->Write(migration.slot, layer, *expert);
  if (begin_ns != 0) {
    track_->Add(
        status.ok() ? kCopy : kGivenUp, begin_ns, TraceNowNs(),
        {layer, migration.expert, static_cast<int64_t>(experts_->slot_bytes()), migration.slot});
  }
  if (status.ok()) return true;
  LogWarn("hot_expert_not_copied", {{"layer", LogValue(layer)},
                                    {"expert", LogValue(migration.expert)},
                                    {"reason", status.ToString()}});
  return false;
}

void HotExperts::WaitForCopies() {
  std::unique_lock lock(mutex_);
  HandOver(/*save=*/false);
  idle_.wait(lock, [this] { return copier_waits_ && queue_.empty() && !save_wanted_; });
}

HotExperts::Counters HotExperts::counters() const {
  const uint64_t resident = resident_.load(std::memory_order_relaxed);
  return {.migrations = migrations_.load(std::memory_order_relaxed),
          .failed_copies = failed_copies_.load(std::memory_order_relaxed),
          .resident_experts = resident,
          .resident_bytes = resident * experts_->slot_bytes(),
          .slots = static_cast<uint64_t>(experts_->slots()),
          .capacity_bytes = static_cast<uint64_t>(experts_->slots()) * experts_->slot_bytes(),
          .streamed_experts = streamed_.load(std::memory_order_relaxed)};
}

}  // namespace tandem::gpu
