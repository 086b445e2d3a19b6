#include "tests/fakes/fake_gpu_worker.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace tandem::testing {
namespace {

using namespace worker::v1;  // NOLINT: all of the protocol's names

constexpr auto kTick = std::chrono::milliseconds(2);
constexpr auto kHeartbeat = std::chrono::milliseconds(20);

WorkerFinish ToFinish(FakeEnd end) {
  switch (end) {
    case FakeEnd::kStopToken:
      return WORKER_FINISH_STOP_TOKEN;
    case FakeEnd::kMaxTokens:
      return WORKER_FINISH_MAX_TOKENS;
    case FakeEnd::kInactive:
      return WORKER_FINISH_INACTIVE;
    case FakeEnd::kNone:
      break;
  }
  return WORKER_FINISH_NONE;
}

void FillLogprob(uint32_t token, int top, uint32_t vocab_size, TokenLogprobs* out) {
  out->set_token_id(token);
  out->set_logprob(FakeGpuWorker::LogprobOf(token));
  out->set_rank(1);
  for (int i = 0; i < top; ++i) {
    const uint32_t id = (token + static_cast<uint32_t>(i)) % vocab_size;
    out->add_top_ids(id);
    out->add_top_logprobs(FakeGpuWorker::LogprobOf(token) - 0.25f * static_cast<float>(i));
  }
}

}  // namespace

class FakeGpuWorker::Service final : public GpuWorkerService::Service {
 public:
  explicit Service(FakeGpuWorker* worker) : worker_(worker) {}

  grpc::Status Load(grpc::ServerContext*, const LoadModelRequest* request,
                    grpc::ServerWriter<LoadModelResponse>* writer) override {
    ++worker_->loads_;
    const std::lock_guard lock(worker_->mutex_);
    if (!worker_->load_status_.ok()) return worker_->load_status_;
    if (request->protocol_version() != 1) {
      return {grpc::StatusCode::FAILED_PRECONDITION, "protocol version"};
    }
    LoadModelResponse response;
    response.set_phase("dense");
    response.set_total_bytes(worker_->options_.load_steps);
    for (uint32_t i = 0; i < worker_->options_.load_steps; ++i) {
      response.set_loaded_bytes(i);
      writer->Write(response);
    }
    *response.mutable_info() = worker_->Info();
    writer->Write(response);
    return grpc::Status::OK;
  }

  grpc::Status GetInfo(grpc::ServerContext*, const GetGpuWorkerInfoRequest*,
                       GetGpuWorkerInfoResponse* response) override {
    const std::lock_guard lock(worker_->mutex_);
    response->set_protocol_version(1);
    response->set_ready(worker_->ready_);
    *response->mutable_model() = worker_->Info();
    response->set_steps(worker_->steps_);
    return grpc::Status::OK;
  }

  grpc::Status Step(grpc::ServerContext* context, FakeGpuWorker::Stream* stream) override {
    const uint64_t broken_before = worker_->streams_broken_;
    StepRequest request;
    while (stream->Read(&request)) {
      if (!worker_->Delay(request.step(), context, stream)) break;
      if (worker_->streams_broken_ != broken_before) break;
      StepResponse response;
      *response.mutable_result() = worker_->Execute(request.step());
      stream->Write(response);
    }
    worker_->ForgetSequences();
    return {grpc::StatusCode::ABORTED, "the stream was broken"};
  }

 private:
  FakeGpuWorker* const worker_;
};

FakeGpuWorker::FakeGpuWorker(FakeGpuWorkerOptions options)
    : options_(std::move(options)),
      step_delay_ms_(options_.step_delay_ms),
      service_(std::make_unique<Service>(this)) {
  NewModel();
}

FakeGpuWorker::~FakeGpuWorker() { Kill(); }

void FakeGpuWorker::NewModel() {
  model_ =
      std::make_unique<FakeModel>(options_.groups, options_.max_sequences, options_.vocab_size);
  model_->set_script(script_);
}

bool FakeGpuWorker::Start() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options_.address, grpc::InsecureServerCredentials());
  builder.RegisterService(service_.get());
  server_ = builder.BuildAndStart();
  return server_ != nullptr;
}

void FakeGpuWorker::Kill() {
  if (!server_) return;
  ++streams_broken_;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
  const std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = model_->error();
  ++epoch_;
  NewModel();
}

void FakeGpuWorker::BreakStream() { ++streams_broken_; }

void FakeGpuWorker::FailNextStep(std::string error) {
  const std::lock_guard lock(mutex_);
  fail_next_ = std::move(error);
}

void FakeGpuWorker::set_ready(bool ready) {
  const std::lock_guard lock(mutex_);
  ready_ = ready;
}

bool FakeGpuWorker::ready() const {
  const std::lock_guard lock(mutex_);
  return ready_;
}

void FakeGpuWorker::set_load_status(grpc::Status status) {
  const std::lock_guard lock(mutex_);
  load_status_ = std::move(status);
}

void FakeGpuWorker::set_script(std::vector<uint32_t> script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
  model_->set_script(script_);
}

size_t FakeGpuWorker::sequences() const {
  const std::lock_guard lock(mutex_);
  return model_->sequences();
}

std::string FakeGpuWorker::error() const {
  const std::lock_guard lock(mutex_);
  return error_.empty() ? model_->error() : error_;
}

std::vector<uint32_t> FakeGpuWorker::Continuation(const std::vector<uint32_t>& prompt,
                                                  const FakeLimits& limits) const {
  const std::lock_guard lock(mutex_);
  return model_->Continuation(prompt, limits);
}

ModelInfo FakeGpuWorker::Model() const {
  const std::lock_guard lock(mutex_);
  return Info();
}

StepResult FakeGpuWorker::Execute(const worker::v1::Step& step) {
  const std::lock_guard lock(mutex_);
  ++steps_;
  return RunStep(step);
}

void FakeGpuWorker::ForgetSequences() {
  const std::lock_guard lock(mutex_);
  model_->ReleaseAll();
}

ModelInfo FakeGpuWorker::Info() const {
  ModelInfo info;
  info.set_epoch(epoch_);
  info.set_vocab_size(options_.vocab_size);
  info.set_max_context_tokens(options_.max_context_tokens);
  info.set_max_step_rows(options_.max_step_rows);
  info.set_max_sequences(options_.max_sequences);
  info.set_max_logprobs(options_.max_logprobs);
  info.set_model_type(options_.model_type);
  for (const FakeGroup& group : options_.groups) {
    CacheGroup* out = info.add_cache_groups();
    out->set_kind(CACHE_KIND_FULL);
    out->set_block_tokens(group.block_tokens);
    out->set_block_count(group.block_count);
  }
  return info;
}

bool FakeGpuWorker::Delay(const worker::v1::Step& step, grpc::ServerContext* context,
                          Stream* stream) {
  const uint64_t broken_before = streams_broken_;
  while (hung_) {
    if (context->IsCancelled() || streams_broken_ != broken_before) return false;
    std::this_thread::sleep_for(kTick);
  }
  if (step.sequences().empty()) return true;
  const auto start = std::chrono::steady_clock::now();
  auto next_heartbeat = start + kHeartbeat;
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(step_delay_ms_)) {
    if (context->IsCancelled() || streams_broken_ != broken_before) return false;
    std::this_thread::sleep_for(kTick);
    if (std::chrono::steady_clock::now() < next_heartbeat || hung_) continue;
    next_heartbeat += kHeartbeat;
    StepResponse response;
    response.mutable_heartbeat()->set_step_id(step.step_id());
    stream->Write(response);
  }
  return true;
}

StepResult FakeGpuWorker::RunStep(const worker::v1::Step& step) {
  StepResult result;
  result.set_step_id(step.step_id());
  result.set_epoch(epoch_);
  for (const uint64_t id : step.release_sequence_ids()) {
    model_->Release(id);
    rules_.erase(id);
  }
  for (const SequenceStart& start : step.starts()) {
    const Stopping& stopping = start.stopping();
    model_->Start(start.sequence_id(),
                  {.stop_ids = {stopping.stop_token_ids().begin(), stopping.stop_token_ids().end()},
                   .min_tokens = stopping.min_tokens(),
                   .max_tokens = stopping.max_tokens(),
                   .seed = start.sampling().seed()});
    rules_[start.sequence_id()] = {.top_logprobs = start.sampling().top_logprobs(),
                                   .prompt_logprobs = start.prompt_logprobs()};
  }
  if (fail_next_ && !step.sequences().empty()) {
    last_failure_ = *std::exchange(fail_next_, std::nullopt);
    ready_ = false;
  }
  if (!ready_ && !step.sequences().empty()) {
    for (const SequenceStep& sequence : step.sequences()) {
      model_->Deactivate(sequence.sequence_id());
    }
    result.set_outcome(STEP_OUTCOME_UNAVAILABLE);
    result.set_error(last_failure_);
    return result;
  }
  uint32_t rows = 0;
  for (const SequenceStep& sequence : step.sequences()) {
    rows += static_cast<uint32_t>(std::max(1, sequence.tokens().ids_size()));
    RunSequence(sequence, result.add_sequences());
  }
  largest_step_ = std::max<uint32_t>(largest_step_, rows);
  result.set_outcome(model_->error().empty() ? STEP_OUTCOME_OK : STEP_OUTCOME_INVALID);
  result.set_error(model_->error());
  return result;
}

void FakeGpuWorker::RunSequence(const SequenceStep& sequence, SequenceResult* result) {
  const uint64_t id = sequence.sequence_id();
  result->set_sequence_id(id);
  for (const BlockAppend& append : sequence.block_appends()) {
    model_->AppendBlocks(
        id, append.cache_group(),
        std::span(append.block_ids().data(), static_cast<size_t>(append.block_ids_size())));
  }
  const auto& ids = sequence.tokens().ids();
  std::optional<std::span<const uint32_t>> tokens;
  if (sequence.has_tokens()) tokens = std::span(ids.data(), static_cast<size_t>(ids.size()));
  const FakeResult run = model_->Run(id, sequence.start_position(), tokens, sequence.sample());
  result->set_finish(ToFinish(run.end));
  const Rules rules = rules_[id];
  for (const uint32_t token : run.tokens) {
    result->add_token_ids(token);
    if (rules.top_logprobs < 0) continue;
    FillLogprob(token, rules.top_logprobs, options_.vocab_size, result->add_logprobs());
  }
  if (rules.prompt_logprobs < 0 || run.end == FakeEnd::kInactive) return;
  for (int i = 0; i < ids.size(); ++i) {
    const bool last = i + 1 == ids.size();
    if (last && !sequence.has_next_prompt_id()) break;
    FillLogprob(last ? sequence.next_prompt_id() : ids[i + 1], rules.prompt_logprobs,
                options_.vocab_size, result->add_prompt_logprobs());
  }
}

}  // namespace tandem::testing
