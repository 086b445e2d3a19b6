#include "expert_worker/expert_worker.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/expert_tensors.h"
#include "common/model/model_loader.h"
#include "expert_worker/engine/model_experts.h"
#include "expert_worker/engine/packed_file.h"

namespace tandem::expert {
namespace {

// Pages whose node is looked up after loading: 1,024 faults and look-ups take milliseconds and tell
// a share of misplaced pages to a few percent.
constexpr size_t kPlacementPages = 1024;

}  // namespace

ExpertWorker::ExpertWorker(const Options& options) : options_(options) {}

ExpertWorker::~ExpertWorker() { Stop(); }

absl::Status ExpertWorker::StartLoad(LoadRequest request) {
  if (!options_.model_dir.empty()) request.model_dir = options_.model_dir;
  if (request.model_dir.empty()) return absl::InvalidArgumentError("no model directory was named");
  if (request.index >= request.shares.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "worker index ", request.index, " is not below the ", request.shares.size(), " shares"));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_ || draining_) return absl::UnavailableError("the expert worker is shutting down");
  if (phase_ == Phase::kLoading || phase_ == Phase::kReady) {
    if (request == request_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("another model or share is loaded: ", request_.model_dir, ", worker ",
                     request_.index, " of ", request_.shares.size()));
  }
  if (loader_.joinable()) loader_.join();  // of a failed load: has ended
  phase_ = Phase::kLoading;
  request_ = request;
  error_ = absl::OkStatus();
  progress_.loaded_bytes = 0;
  progress_.total_bytes = 0;
  loader_ = std::thread([this, request = std::move(request)] { LoadMain(request); });
  return absl::OkStatus();
}

void ExpertWorker::LoadMain(const LoadRequest& request) {
  pthread_setname_np(pthread_self(), "loader");
  absl::Status status;
  try {
    status = Load(request);
  } catch (const std::exception& error) {
    // oneTBB and the standard library report exhausted memory or threads by throwing.
    status = absl::ResourceExhaustedError(absl::StrCat("loading experts: ", error.what()));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  phase_ = status.ok() ? Phase::kReady : Phase::kFailed;
  error_ = status;
  if (!status.ok()) LogError("experts_not_loaded", {{"reason", status.ToString()}});
  load_ended_.notify_all();
}

absl::Status ExpertWorker::Load(const LoadRequest& request) {
  const auto started = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                   Checkpoint::Open(request.model_dir));
  ASSIGN_OR_RETURN(const ModelSpec model, LoadModelSpec(*checkpoint));
  ASSIGN_OR_RETURN(const ExpertTensors tensors, ExpertTensors::Create(*checkpoint, model));
  ASSIGN_OR_RETURN(const StoreSpec spec,
                   MakeStoreSpec(*checkpoint, model, tensors, request.shares, request.index));
  std::unique_ptr<WeightStore> store;
  ASSIGN_OR_RETURN(store, OpenStore(spec, tensors));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  LogInfo("experts_loaded",
          {{"model", request.model_dir},
           {"segments", absl::StrCat(spec.segments.begin, "-", spec.segments.end, "/",
                                     SegmentCount(spec.intermediate, spec.quantum))},
           {"bytes", LogValue(store->data_bytes())},
           {"pages", std::string(PageKindName(store->page_kind()))},
           {"sealed", store->sealed() ? "yes" : "no"},
           {"reattached", reattached_ ? "yes" : "no"},
           {"seconds", LogValue(seconds.count())}});
  store_ = std::move(store);
  CheckPlacement();
  return StartEngine();
}

absl::StatusOr<std::unique_ptr<WeightStore>> ExpertWorker::OpenStore(const StoreSpec& spec,
                                                                     const ExpertTensors& tensors) {
  if (options_.map_weights) {
    const CheckpointExperts source(&tensors);
    ASSIGN_OR_RETURN(const PackedFile packed,
                     PackedFile::OpenOrPack(PackedFile::PathFor(options_.state_dir, spec), spec,
                                            source, options_.threads, &progress_));
    return packed.Map(spec);
  }
  if (options_.weights_fd >= 0) {
    auto store = OpenKeptStore(spec, tensors);
    if (store.ok() || !absl::IsFailedPrecondition(store.status())) return store;
    LogWarn("kept_store_not_usable", {{"reason", store.status().ToString()}});
  }
  ASSIGN_OR_RETURN(const StoreManifest manifest, MakeManifest(spec));
  ASSIGN_OR_RETURN(const Memfd memfd,
                   CreateMemfd("tandem-experts", manifest.file_bytes, options_.huge_pages));
  own_fd_ = shm::UniqueFd(memfd.fd);
  reattached_ = false;
  PreferNodeOf(own_fd_.get(), manifest.file_bytes);
  return FillStore(own_fd_.get(), spec, tensors);
}

// The supervisor's memfd: attached to if it holds this very store, else written anew.
absl::StatusOr<std::unique_ptr<WeightStore>> ExpertWorker::OpenKeptStore(
    const StoreSpec& spec, const ExpertTensors& tensors) {
  auto store = WeightStore::Attach(options_.weights_fd, spec);
  reattached_ = store.ok();
  if (store.ok()) {
    progress_.total_bytes = (*store)->data_bytes();
    progress_.loaded_bytes = (*store)->data_bytes();
    return store;
  }
  if (!absl::IsNotFound(store.status())) {
    LogWarn("kept_store_refused", {{"reason", store.status().ToString()}});
  }
  ASSIGN_OR_RETURN(const StoreManifest manifest, MakeManifest(spec));
  RETURN_IF_ERROR(CheckKeptPages(manifest.file_bytes));
  PreferNodeOf(options_.weights_fd, manifest.file_bytes);
  return FillStore(options_.weights_fd, spec, tensors);
}

// From the packed file where there is one or room for it, else from the checkpoint.
absl::StatusOr<std::unique_ptr<WeightStore>> ExpertWorker::FillStore(int fd, const StoreSpec& spec,
                                                                     const ExpertTensors& tensors) {
  if (!options_.state_dir.empty()) {
    auto store = LoadPacked(fd, spec, tensors);
    if (store.ok() || absl::IsCancelled(store.status())) return store;
    LogWarn("packed_file_not_used", {{"reason", store.status().ToString()}});
  }
  return WeightStore::Build(fd, spec, CheckpointExperts(&tensors), HowToLoad(), &progress_);
}

absl::StatusOr<std::unique_ptr<WeightStore>> ExpertWorker::LoadPacked(
    int fd, const StoreSpec& spec, const ExpertTensors& tensors) {
  const std::string path = PackedFile::PathFor(options_.state_dir, spec);
  const CheckpointExperts source(&tensors);
  RETURN_IF_ERROR(PackedFile::CheckRoom(path, spec));
  ASSIGN_OR_RETURN(const PackedFile packed,
                   PackedFile::OpenOrPack(path, spec, source, options_.threads, &progress_));
  auto store = packed.Load(fd, spec, HowToLoad(), &progress_);
  if (!absl::IsDataLoss(store.status())) return store;
  LogWarn("packed_file_refused", {{"reason", store.status().ToString()}});
  packed.Discard();
  ASSIGN_OR_RETURN(const PackedFile again,
                   PackedFile::OpenOrPack(path, spec, source, options_.threads, &progress_));
  return again.Load(fd, spec, HowToLoad(), &progress_);
}

// The supervisor gives plain pages where the pool is too small for all workers.
absl::Status ExpertWorker::CheckKeptPages(uint64_t bytes) const {
  if (options_.huge_pages == HugePages::kOff || IsHugeTlb(options_.weights_fd)) {
    return absl::OkStatus();
  }
  const std::string advice = HugePageAdvice(bytes);
  if (options_.huge_pages == HugePages::kRequire) {
    return absl::ResourceExhaustedError(absl::StrCat("--huge-pages=require: ", advice));
  }
  LogInfo("no_explicit_huge_pages", {{"advice", advice}});
  return absl::OkStatus();
}

void ExpertWorker::PreferNodeOf(int fd, uint64_t bytes) const {
  if (options_.numa_node < 0) return;
  const absl::Status status = PreferNode(fd, bytes, options_.numa_node, *options_.numa_policy);
  if (status.ok()) return;
  LogWarn("weights_placed_by_first_touch",
          {{"node", LogValue(options_.numa_node)}, {"reason", std::string(status.message())}});
}

void ExpertWorker::CheckPlacement() {
  if (options_.numa_node < 0) return;
  const int fd = own_fd_.valid() ? own_fd_.get() : options_.weights_fd;
  const auto sample =
      SamplePlacement(fd, kPlacementPages, options_.numa_node, *options_.numa_policy);
  if (!sample.ok()) {
    LogWarn("weights_placement_unknown", {{"reason", std::string(sample.status().message())}});
    return;
  }
  weights_placement_ = *sample;
  if (sample->misplaced == 0) return;
  LogWarn("weights_misplaced", {{"node", LogValue(options_.numa_node)},
                                {"sampled_pages", LogValue(sample->pages)},
                                {"misplaced_pages", LogValue(sample->misplaced)}});
}

absl::Status ExpertWorker::StartEngine() {
  experts_ = std::make_unique<RoutedExperts>(store_.get(), options_.kernels,
                                             RoutedExperts::Options{.threads = options_.threads});
  LinkLoop::Options link;
  link.socket_path = options_.link_socket;
  link.thread_cpus = options_.cpus;
  if (link.thread_cpus.empty()) {
    link.thread_cpus.assign(static_cast<size_t>(options_.threads), -1);
  }
  link.placement = options_.placement;
  for (int i = 0; options_.tracer != nullptr && i < options_.threads; ++i) {
    link.tracks.push_back(options_.tracer->AddTrack(absl::StrCat("experts ", i)));
  }
  ASSIGN_OR_RETURN(loop_, LinkLoop::Start(link, experts_.get()));
  compute_ = std::thread([this, loop = loop_.get()] {
    pthread_setname_np(pthread_self(), "pool-0");
    // The loop does its own waiting: a thread of the pool that has nothing to do sleeps.
    Pool pool({.threads = options_.threads,
               .cpus = options_.cpus,
               .pin_caller = true,
               .spin = std::chrono::microseconds(0)});
    pinned_threads_ = pool.pinned_threads();
    if (pool.pinned_threads() < static_cast<int>(options_.cpus.size())) {
      LogWarn("threads_not_pinned", {{"pinned", LogValue(pool.pinned_threads())},
                                     {"threads", LogValue(options_.threads)}});
    }
    pool.Run([loop](int thread) { loop->RunThread(thread); });
  });
  return absl::OkStatus();
}

ExpertWorker::Info ExpertWorker::WaitForLoad(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  load_ended_.wait_for(lock, timeout, [this] { return phase_ != Phase::kLoading; });
  return InfoLocked();
}

absl::StatusOr<ExpertWorker::Attached> ExpertWorker::Attach(const AttachRequest& request) {
  LinkLoop::AttachSpec spec;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (draining_ || stopped_) return absl::UnavailableError("the expert worker is draining");
    if (phase_ != Phase::kReady) {
      return absl::FailedPreconditionError("no experts are loaded; Load comes first");
    }
    const StoreManifest& m = store_->manifest();
    spec.limits.num_experts = m.experts;
    spec.limits.num_layers = m.layers;
    spec.model_hash = m.model_hash;
    // A mapped packed file is not sealed, hence not handed over.
    if (store_->sealed()) spec.weights_fd = own_fd_.valid() ? own_fd_.get() : options_.weights_fd;
  }
  spec.limits.max_rows = request.max_rows;
  spec.limits.hidden = request.hidden;
  spec.limits.top_k = request.top_k;
  spec.limits.lanes = request.lanes;
  spec.limits.row_type = request.row_type;
  ASSIGN_OR_RETURN(shm::LinkTicket ticket, loop_->Offer(spec));
  return Attached{std::move(ticket), spec.model_hash};
}

void ExpertWorker::Drain() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
    if (phase_ != Phase::kReady) return;
  }
  loop_->Detach();
}

void ExpertWorker::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
  }
  progress_.cancel = true;
  if (loader_.joinable()) loader_.join();
  if (loop_ != nullptr) loop_->Stop();
  if (compute_.joinable()) compute_.join();
}

ExpertWorker::Info ExpertWorker::info() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return InfoLocked();
}

ExpertWorker::Info ExpertWorker::InfoLocked() const {
  Info info;
  info.phase = phase_;
  info.error = error_;
  info.loaded_bytes = progress_.loaded_bytes;
  info.total_bytes = progress_.total_bytes;
  info.draining = draining_;
  info.pinned_threads = pinned_threads_;
  if (phase_ != Phase::kReady) return info;
  info.reattached = reattached_;
  info.weights_bytes = store_->data_bytes();
  info.workspace_bytes = experts_->workspace_bytes();
  info.model_hash = store_->manifest().model_hash;
  info.page_kind = store_->page_kind();
  info.weights_placement = weights_placement_;
  info.link = loop_->state();
  return info;
}

}  // namespace tandem::expert
