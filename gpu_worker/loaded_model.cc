#include "gpu_worker/loaded_model.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/model/expert_tensors.h"
#include "common/model/host_memory.h"
#include "common/model/memory_plan.h"
#include "common/model/model_loader.h"
#include "common/model/model_tensors.h"
#include "expert_worker/engine/model_experts.h"
#include "gpu_worker/link_limits.h"

namespace tandem::gpu {
namespace {

// Unless told otherwise the KV cache takes at most this part of what is free.
constexpr uint64_t kKvCacheDivisor = 4;

DType CacheType(const WorkerOptions& options) {
  return options.parity ? DType::kF32 : DType::kBF16;
}

int ContextOf(const ModelSpec& spec, const WorkerOptions& options) {
  return options.max_context > 0 ? std::min(options.max_context, spec.max_context)
                                 : spec.max_context;
}

absl::StatusOr<int64_t> CacheTokens(const ModelSpec& spec, const WorkerOptions& options) {
  if (options.kv_cache_tokens > 0) return options.kv_cache_tokens;
  ASSIGN_OR_RETURN(const HostMemory host, ReadHostMemory());
  const uint64_t token_bytes = std::max<uint64_t>(1, KvBytesPerToken(spec, CacheType(options)));
  const auto affordable =
      static_cast<int64_t>(host.available_bytes / kKvCacheDivisor / token_bytes);
  const int64_t usable = int64_t{ContextOf(spec, options)} * options.max_sequences;
  const int64_t tokens = std::min(affordable, usable);
  if (tokens < options.block_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a KV cache: a quarter of the free ",
                     FormatBytes(host.available_bytes), " holds ", tokens, " tokens"));
  }
  return tokens;
}

// What this process is about to take; expert workers look after themselves.
absl::Status CheckMemory(const Checkpoint& checkpoint, const ModelSpec& spec,
                         const WorkerOptions& options) {
  PlanRequest request;
  request.dense_bytes = DenseWeightBytes(checkpoint, spec);
  if (options.inprocess_experts && spec.moe.experts > 0) {
    ASSIGN_OR_RETURN(request.expert_bytes,
                     expert::StoreBytes(checkpoint, spec, options.expert_shares));
  }
  request.hot_expert_bytes = options.hot_experts_bytes;
  request.kv_bytes_per_token = KvBytesPerToken(spec, CacheType(options));
  request.kv_tokens = options.kv_cache_tokens;
  ASSIGN_OR_RETURN(const HostMemory host, ReadHostMemory());
  const MemoryPlan plan = MakeMemoryPlan(request, host);
  LogInfo("memory_plan", {{"needed", FormatBytes(plan.needed_bytes)},
                          {"available", FormatBytes(plan.host.available_bytes)},
                          {"kv_tokens", LogValue(request.kv_tokens)},
                          {"kv_bytes_per_token", LogValue(request.kv_bytes_per_token)}});
  return plan.Check();
}

}  // namespace

LoadProgress::Snapshot LoadProgress::Read() const {
  Snapshot snapshot{.phase = phase_.load(std::memory_order_relaxed),
                    .loaded_bytes = dense_.load(std::memory_order_relaxed) +
                                    engine_.loaded_bytes.load(std::memory_order_relaxed),
                    .total_bytes = total_.load(std::memory_order_relaxed) +
                                   engine_.total_bytes.load(std::memory_order_relaxed)};
  const std::lock_guard lock(mutex_);
  if (workers_ != nullptr) {
    snapshot.loaded_bytes += workers_->loaded_bytes();
    snapshot.total_bytes += workers_->total_bytes();
  }
  return snapshot;
}

void LoadProgress::SetExperts(ExpertWorkers* workers) {
  const std::lock_guard lock(mutex_);
  workers_ = workers;
  if (workers != nullptr && cancelled()) workers->Stop();
}

void LoadProgress::Cancel() {
  const std::lock_guard lock(mutex_);
  engine_.cancel.store(true);
  if (workers_ != nullptr) workers_->Stop();
}

void LoadProgress::Reset() {
  SetPhase("dense");
  total_.store(0);
  dense_.store(0);
  engine_.loaded_bytes.store(0);
  engine_.total_bytes.store(0);
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadedModel::Create(const std::string& dir,
                                                                 const WorkerOptions& given,
                                                                 LoadProgress& progress) {
  std::unique_ptr<LoadedModel> model(new LoadedModel());
  ASSIGN_OR_RETURN(model->checkpoint_, Checkpoint::Open(dir));
  ASSIGN_OR_RETURN(model->spec_, LoadModelSpec(*model->checkpoint_));
  model->model_hash_ = ModelHash(*model->checkpoint_, model->spec_);
  WorkerOptions options = given;
  ASSIGN_OR_RETURN(options.kv_cache_tokens, CacheTokens(model->spec_, given));
  RETURN_IF_ERROR(CheckMemory(*model->checkpoint_, model->spec_, options));
  progress.AddTotal(DenseBytes(*model->checkpoint_, model->spec_));
  // Experts load in their own processes meanwhile.
  absl::Status experts;
  std::thread loader;
  const bool has_workers = model->spec_.moe.experts > 0 && !options.inprocess_experts;
  if (has_workers) {
    if (options.expert_addresses.empty()) {
      return absl::FailedPreconditionError(
          "the model has routed experts: --expert-workers or --link=inprocess is needed");
    }
    std::vector<int> cpus = options.cpus;
    cpus.resize(static_cast<size_t>(options.threads), -1);
    ExpertWorkersOptions workers;
    workers.addresses = options.expert_addresses;
    workers.shares = options.expert_shares;
    workers.thread_cpus = std::move(cpus);
    workers.placement = options.placement;
    RETURN_IF_ERROR(model->MakeWeightSource(options));
    model->SetWeightHandlers(workers);
    model->workers_ = std::make_unique<ExpertWorkers>(workers);
    progress.SetExperts(model->workers_.get());
    loader = std::thread([&] { experts = model->workers_->Load(dir); });
  }
  absl::Status status = model->LoadDense(options, progress);
  // What cannot be is refused before experts have loaded.
  if (status.ok()) status = model->MakeHotExperts(options);
  if (!status.ok() && has_workers) model->workers_->Stop();
  if (loader.joinable()) {
    if (status.ok()) progress.SetPhase("experts");
    loader.join();
  }
  if (status.ok()) status = experts;
  if (status.ok()) status = model->LoadExperts(options, progress);
  progress.SetExperts(nullptr);
  RETURN_IF_ERROR(status);
  progress.SetPhase("warmup");
  RETURN_IF_ERROR(model->WarmUp());
  model->FillInfo(options);
  model->checkpoint_.reset();
  return model;
}

LoadedModel::~LoadedModel() { Stop(); }

void LoadedModel::Stop() {
  if (workers_ != nullptr) workers_->Stop();
}

absl::Status LoadedModel::LoadDense(const WorkerOptions& options, LoadProgress& progress) {
  CpuBackendOptions backend;
  backend.threads = options.threads;
  backend.cpus = options.cpus;
  backend.pin_caller = !options.cpus.empty();
  backend.kernels = options.kernels;
  backend.max_rows = options.max_step_rows;
  backend.max_vocab = spec_.vocab;
  backend.max_experts = spec_.moe.experts;
  backend_ = std::make_unique<CpuBackend>(backend);
  ASSIGN_OR_RETURN(weights_, LoadModelWeights(*checkpoint_, spec_, *backend_, [&](uint64_t bytes) {
                     progress.SetDense(bytes);
                     return progress.cancelled() ? absl::CancelledError("stopping")
                                                 : absl::OkStatus();
                   }));
  return MakeRunner(options);
}

absl::Status LoadedModel::MakeRunner(const WorkerOptions& options) {
  ASSIGN_OR_RETURN(cache_, KvCache::Create(*backend_, spec_,
                                           {.block_tokens = options.block_tokens,
                                            .tokens = options.kv_cache_tokens,
                                            .dtype = CacheType(options)}));
  ASSIGN_OR_RETURN(runner_, StepRunner::Create(*backend_, spec_, weights_, cache_,
                                               {.max_step_rows = options.max_step_rows,
                                                .max_sequences = options.max_sequences,
                                                .max_context = ContextOf(spec_, options),
                                                .max_logprobs = options.max_logprobs,
                                                .hot_experts = options.hot_experts_bytes > 0,
                                                .pipeline = options.pipeline,
                                                .tracer = options.tracer}));
  runner_->set_epoch(options.epoch);
  return absl::OkStatus();
}

absl::Status LoadedModel::LoadExperts(const WorkerOptions& options, LoadProgress& progress) {
  if (spec_.moe.experts == 0) return absl::OkStatus();
  const shm::RowType rows = options.parity ? shm::RowType::kF32 : shm::RowType::kBf16;
  if (workers_ != nullptr) {
    RETURN_IF_ERROR(workers_->Attach(LinkLimits(spec_, options.max_step_rows, rows), model_hash_));
    runner_->set_link(workers_->link());
    return CheckWeightSource(options);
  }
  progress.SetPhase("experts");
  InProcessExpertsOptions inprocess;
  inprocess.shares = options.expert_shares;
  inprocess.kernels = options.kernels;
  inprocess.threads = options.threads;
  inprocess.max_rows = options.max_step_rows;
  inprocess.row_type = rows;
  ASSIGN_OR_RETURN(inprocess_,
                   InProcessExperts::Create(*checkpoint_, spec_, inprocess, progress.engine()));
  runner_->set_link(inprocess_->link());
  if (options.hot_experts_bytes > 0) weight_source_ = inprocess_->MakeWeightSource();
  return MakeHotExperts(options);
}

// What the workers' stores must be, by the checkpoint: a worker's own word is not taken.
absl::Status LoadedModel::MakeWeightSource(const WorkerOptions& options) {
  if (options.hot_experts_bytes == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const ExpertTensors tensors, ExpertTensors::Create(*checkpoint_, spec_));
  std::vector<expert::StoreSpec> specs;
  for (uint32_t i = 0; i < options.expert_shares.size(); ++i) {
    ASSIGN_OR_RETURN(specs.emplace_back(),
                     expert::MakeStoreSpec(*checkpoint_, spec_, tensors, options.expert_shares, i));
  }
  weight_source_ = std::make_unique<StoreExperts>(std::move(specs));
  return absl::OkStatus();
}

void LoadedModel::SetWeightHandlers(ExpertWorkersOptions& workers) {
  if (weight_source_ == nullptr) return;
  StoreExperts* const source = weight_source_.get();
  workers.on_weights = [source](size_t worker, const shm::UniqueFd& fd) {
    const absl::Status status =
        fd.valid() ? source->Attach(worker, fd.get())
                   : absl::FailedPreconditionError("its weights are not in sealed memory");
    if (status.ok()) return;
    LogWarn("hot_experts_without_weights",
            {{"worker", LogValue(worker)}, {"reason", status.ToString()}});
  };
  workers.on_lost = [source](size_t worker) { source->Drop(worker); };
}

absl::Status LoadedModel::CheckWeightSource(const WorkerOptions& options) const {
  if (weight_source_ == nullptr || weight_source_->available()) return absl::OkStatus();
  const std::string& address = options.expert_addresses[weight_source_->first_missing()];
  return absl::InvalidArgumentError(absl::StrCat(
      "--hot-experts-gb copies experts out of the workers' sealed memory, and the worker at ",
      address, " hands none over: start it with --weights=copy, or set --hot-experts-gb=0"));
}

absl::Status LoadedModel::MakeHotExperts(const WorkerOptions& options) {
  if (weight_source_ == nullptr) return absl::OkStatus();
  ResidentShape shape = weight_source_->Shape(spec_.moe.top_k);
  shape.budget_bytes = options.hot_experts_bytes;
  HotExpertsOptions hot;
  hot.model_hash = model_hash_;
  hot.experts = spec_.moe.experts;
  for (const RouterPicks& picks : runner_->decoder().picks()) hot.moe_layers.push_back(picks.layer);
  hot.stream_prompts = options.stream_prompts;
  hot.state_dir = options.state_dir;
  hot.tracer = options.tracer;
  ASSIGN_OR_RETURN(hot_, HotExperts::Create(*backend_, shape, *weight_source_, hot));
  runner_->set_hot_experts(hot_.get());
  LogInfo("hot_experts", {{"slots", LogValue(hot_->counters().slots)},
                          {"budget", FormatBytes(options.hot_experts_bytes)}});
  return absl::OkStatus();
}

HotExpertCounters LoadedModel::hot_experts() const {
  if (hot_ == nullptr) return {};
  const PipelineCounters& pipeline = runner_->pipeline().counters();
  return {.picks = pipeline.routed_rows * static_cast<uint64_t>(spec_.moe.top_k),
          .hits = pipeline.resident_picks,
          .copies = hot_->counters()};
}

// One prefill row and one decode row in block 0: touches every buffer, wakes every thread.
absl::Status LoadedModel::WarmUp() {
  worker::v1::Step step;
  step.set_epoch(runner_->epoch());
  worker::v1::SequenceStart& start = *step.add_starts();
  start.set_sequence_id(1);
  start.mutable_sampling()->set_top_p(1);
  start.mutable_sampling()->set_repetition_penalty(1);
  start.mutable_sampling()->set_top_logprobs(-1);
  start.set_prompt_logprobs(-1);
  worker::v1::SequenceStep& sequence = *step.add_sequences();
  sequence.set_sequence_id(1);
  sequence.mutable_tokens()->add_ids(0);
  sequence.set_sample(true);
  sequence.add_block_appends()->add_block_ids(0);
  worker::v1::StepResult result;
  for (int i = 0; i < 2; ++i) {
    Run(step, result);
    if (result.outcome() != worker::v1::STEP_OUTCOME_OK) {
      return absl::UnavailableError(absl::StrCat("warm-up step: ", result.error()));
    }
    if (result.sequences(0).finish() == worker::v1::WORKER_FINISH_NUMERIC_ERROR) {
      return absl::DataLossError("warm-up step: the model's numbers are not finite");
    }
    step.clear_starts();
    sequence.set_start_position(1);
    sequence.set_last_sampled(true);
    sequence.clear_block_appends();
  }
  runner_->Reset();
  return absl::OkStatus();
}

void LoadedModel::FillInfo(const WorkerOptions& options) {
  const SequenceLimits& limits = runner_->limits();
  info_.set_epoch(options.epoch);
  info_.set_vocab_size(static_cast<uint32_t>(limits.vocab));
  info_.set_max_context_tokens(static_cast<uint32_t>(limits.max_context));
  info_.set_max_step_rows(static_cast<uint32_t>(limits.max_step_rows));
  info_.set_max_sequences(static_cast<uint32_t>(limits.max_sequences));
  worker::v1::CacheGroup& group = *info_.add_cache_groups();
  const int window = spec_.attention.window_tokens;
  group.set_kind(window > 0 ? worker::v1::CACHE_KIND_WINDOW : worker::v1::CACHE_KIND_FULL);
  group.set_block_tokens(static_cast<uint32_t>(limits.block_tokens));
  group.set_block_count(static_cast<uint32_t>(limits.block_count));
  group.set_window_tokens(static_cast<uint32_t>(window));
  info_.set_parity(options.parity);
  info_.set_model_type(spec_.model_type);
  info_.set_model_hash(model_hash_);
  info_.set_max_logprobs(static_cast<uint32_t>(limits.max_logprobs));
}

void LoadedModel::Run(const worker::v1::Step& step, worker::v1::StepResult& result) {
  if (workers_ != nullptr) workers_->TakeReplacements();
  runner_->Run(step, result);
}

uint64_t LoadedModel::progress() const {
  return runner_->progress() + (workers_ == nullptr ? 0 : workers_->ticks());
}

}  // namespace tandem::gpu
