#include "gpu_worker/step_runner.h"

#include <algorithm>
#include <cmath>

#include "common/base/check.h"
#include "common/base/status.h"

namespace tandem::gpu {
namespace {

using worker::v1::SequenceResult;
using worker::v1::SequenceStep;
using worker::v1::Step;
using worker::v1::StepResult;
using worker::v1::TokenLogprobs;
using worker::v1::WorkerFinish;

void SetOutcome(StepResult& result, worker::v1::StepOutcome outcome, const absl::Status& status) {
  result.set_outcome(outcome);
  result.set_error(std::string(status.message()));
}

void FillLogprobs(const LogprobBuffers& buffers, size_t row, int32_t token, TokenLogprobs& out) {
  out.set_token_id(static_cast<uint32_t>(token));
  out.set_logprob(buffers.logprobs[row]);
  out.set_rank(static_cast<uint32_t>(buffers.ranks[row]));
  for (int32_t i = 0; i < buffers.top[row]; ++i) {
    const size_t entry = row * static_cast<size_t>(buffers.max_top) + static_cast<size_t>(i);
    if (buffers.top_ids[entry] < 0) break;  // the vocabulary is smaller than what was asked for
    out.add_top_ids(static_cast<uint32_t>(buffers.top_ids[entry]));
    out.add_top_logprobs(buffers.top_logprobs[entry]);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepRunner>> StepRunner::Create(Backend& backend,
                                                               const ModelSpec& spec,
                                                               const ModelWeights& weights,
                                                               const KvCache& cache,
                                                               const StepRunnerOptions& options) {
  const SequenceLimits limits{.max_sequences = options.max_sequences,
                              .max_context = options.max_context,
                              .max_step_rows = options.max_step_rows,
                              .vocab = spec.vocab,
                              .block_tokens = cache.block_tokens(),
                              .block_count = cache.block_count(),
                              .max_logprobs = options.max_logprobs};
  if (limits.max_sequences > limits.max_step_rows) {
    return absl::InvalidArgumentError("max_sequences is above max_step_rows");
  }
  std::unique_ptr<StepRunner> runner(new StepRunner(backend, spec, cache, limits, options));
  RETURN_IF_ERROR(runner->MakeBuffers(weights, options));
  return runner;
}

StepRunner::StepRunner(Backend& backend, const ModelSpec& spec, const KvCache& cache,
                       const SequenceLimits& limits, const StepRunnerOptions& options)
    : backend_(backend),
      spec_(spec),
      cache_(cache),
      clock_(options.clock == nullptr ? steady_clock_ : *options.clock),
      table_(limits),
      validator_(limits),
      plan_(limits, {.defer_prefill = options.pipeline.defer_prefill}),
      trace_(options.tracer) {}

absl::Status StepRunner::MakeBuffers(const ModelWeights& weights,
                                     const StepRunnerOptions& options) {
  const PipelineOptions& pipeline = options.pipeline;
  const SequenceLimits& limits = table_.limits();
  const StepPipeline::Limits bounds{.max_rows = limits.max_step_rows,
                                    .max_sequences = limits.max_sequences,
                                    .top_k = spec_.moe.top_k};
  // All samples of a step fit at once; prompt log-probabilities go in chunks of as many rows.
  const DecoderOptions decoder{
      .buffer_rows = StepPipeline::BufferRows(bounds),
      .head_rows = limits.max_sequences,
      .split = {.deferral = pipeline.defers(), .residents = options.hot_experts}};
  ASSIGN_OR_RETURN(decoder_, Decoder::Create(backend_, spec_, weights, cache_, decoder));
  ASSIGN_OR_RETURN(TokenCounts counts,
                   TokenCounts::Create(backend_, limits.max_sequences, spec_.vocab));
  counts_ = std::make_unique<TokenCounts>(std::move(counts));
  const size_t moe_layers = decoder_->picks().size();
  RETURN_IF_ERROR(buffers_.Create(backend_, limits,
                                  {.rows = decoder.buffer_rows,
                                   .head_rows = decoder.head_rows,
                                   .stamps = kMaxLanes * static_cast<int>(moe_layers)}));
  pipeline_ = std::make_unique<StepPipeline>(pipeline, bounds, *decoder_);
  std::vector<int> layers;
  for (const RouterPicks& layer : decoder_->picks()) layers.push_back(layer.layer);
  trace_.set_layers(std::move(layers));
  picks_.Create(moe_layers,
                static_cast<size_t>(decoder.buffer_rows) * static_cast<size_t>(spec_.moe.top_k));
  return absl::OkStatus();
}

void StepRunner::set_link(ExpertLink* link) {
  link_ = link;
  pipeline_->set_link(link);
}

void StepRunner::Run(const Step& step, StepResult& result) {
  const int64_t start_ns = clock_.NowNs();
  result.set_step_id(step.step_id());
  result.set_epoch(epoch_);
  result.set_outcome(worker::v1::STEP_OUTCOME_OK);
  result.clear_error();
  result.mutable_sequences()->Clear();
  result.mutable_timing()->Clear();
  if (step.epoch() != epoch_) {
    SetOutcome(result, worker::v1::STEP_OUTCOME_UNAVAILABLE,
               absl::UnavailableError("the worker's state was lost since this step was planned"));
    return;
  }
  if (const absl::Status status = validator_.Check(step, table_); !status.ok()) {
    SetOutcome(result, worker::v1::STEP_OUTCOME_INVALID, status);
    return;
  }
  pipeline_->set_traced(trace_.Begin());
  StartAndRelease(step);
  absl::Status status = CopyBlocks(step);
  plan_.Build(step, table_, buffers_);
  if (status.ok()) status = Forward();
  const int64_t forward_ns = clock_.NowNs() - start_ns;
  if (!status.ok()) {
    plan_.Rollback(table_);
    SetOutcome(result, worker::v1::STEP_OUTCOME_UNAVAILABLE, status);
  } else {
    Commit(step, result);
    if (plan_.rows() > 0) pipeline_->Observe(plan_, buffers_, forward_ns);
    if (plan_.rows() > 0 && hot_ != nullptr) {
      CountPicks();
      ObserveStream();
    }
    if (plan_.rows() > 0) pipeline_->Report(step.target_us(), *result.mutable_timing());
    if (plan_.rows() > 0 && pipeline_->traced()) TraceStep(step);
  }
  result.mutable_timing()->set_total_us(static_cast<uint64_t>((clock_.NowNs() - start_ns) / 1000));
  result.mutable_timing()->set_rows(static_cast<uint32_t>(plan_.rows()));
}

void StepRunner::StartAndRelease(const Step& step) {
  for (const uint64_t id : step.release_sequence_ids()) table_.Release(id);
  for (const auto& start : step.starts()) {
    const int slot = table_.Start(start);
    if (table_.at(slot).has_penalties()) counts_->Start(backend_, slot, start);
  }
}

absl::Status StepRunner::CopyBlocks(const Step& step) {
  for (int begin = 0; begin < step.block_copies_size(); begin += StepBuffers::kCopiesAtOnce) {
    const int count = std::min(step.block_copies_size() - begin, StepBuffers::kCopiesAtOnce);
    for (int i = 0; i < count; ++i) {
      const auto& copy = step.block_copies(begin + i);
      buffers_.copy_source[static_cast<size_t>(i)] = static_cast<int32_t>(copy.source_block());
      buffers_.copy_target[static_cast<size_t>(i)] = static_cast<int32_t>(copy.target_block());
    }
    buffers_.copy_source.Upload(backend_, static_cast<size_t>(count));
    buffers_.copy_target.Upload(backend_, static_cast<size_t>(count));
    cache_.EnqueueCopies(backend_, buffers_.copy_source.device(), buffers_.copy_target.device(),
                         count);
    RETURN_IF_ERROR(backend_.Synchronize());  // the staging arrays are used again
  }
  return absl::OkStatus();
}

absl::Status StepRunner::Forward() {
  if (plan_.rows() == 0) return backend_.Synchronize();
  const bool needs_link = spec_.moe.experts > 0;
  if (needs_link && (link_ == nullptr || link_->broken())) {
    return absl::UnavailableError("an expert worker is not attached");
  }
  pipeline_->Choose(plan_, buffers_);
  if (hot_ != nullptr) hot_->BeginStep();
  const bool may_stream = hot_ != nullptr && !plan_.is_decode();
  stream_ = may_stream ? hot_->BeginStream(plan_.rows()) : nullptr;
  plan_.Upload(backend_, buffers_);
  pipeline_->Upload(backend_, buffers_, plan_);
  ++forwards_;
  if (needs_link) link_->BeginStep(forwards_);
  trace_.Mark(&HostStamps::prepared_ns);
  Enqueue();
  Download();
  trace_.Mark(&HostStamps::enqueued_ns);
  const absl::Status device = backend_.Synchronize();
  trace_.Mark(&HostStamps::synchronized_ns);
  const absl::Status experts = needs_link ? link_->EndStep() : absl::OkStatus();
  return device.ok() ? experts : device;
}

// A decode step is one graph a bucket: what differs between two of them is device memory only.
void StepRunner::Enqueue() {
  const SequenceLimits& limits = table_.limits();
  const bool decode = plan_.is_decode();
  const GraphKey key = pipeline_->graph_key();
  if (decode) backend_.GraphBegin(key);
  StepInputs inputs = pipeline_->Inputs(buffers_);
  if (hot_ != nullptr) inputs.residents = hot_->residents();
  if (stream_ != nullptr) inputs.residents = stream_->residents();
  inputs.stream = stream_;
  inputs.place = {.positions = buffers_.positions.device(),
                  .sequence = buffers_.row_sequence.device(),
                  .block_table = buffers_.block_table.device(),
                  .blocks_per_sequence = limits.blocks_per_sequence(),
                  .block_tokens = limits.block_tokens};
  Stamp(&StepStamps::begin);
  decoder_->EnqueueForward(inputs, link_);
  Stamp(&StepStamps::layers);
  const int most_samples = decode ? key.bucket + key.second_bucket : plan_.samples();
  const Rows samples{.bound = BucketOf(most_samples, limits.max_sequences),
                     .count = buffers_.sample_count.device()};
  if (plan_.samples() > 0) EnqueueSampler(samples);
  if (decode) backend_.GraphEnd();
  if (plan_.wants_logprobs()) {
    LogprobsArgs args =
        buffers_.sampled.Args(samples, decoder_->activations().logits, spec_.vocab, 0);
    args.targets = buffers_.tokens.device();
    backend_.Logprobs(args);
  }
  EnqueuePromptLogprobs();
  Stamp(&StepStamps::end);
}

void StepRunner::Stamp(int64_t StepStamps::*corner) {
  if (pipeline_->traced()) backend_.Stamp(&(buffers_.step_stamps.device()->*corner));
}

void StepRunner::EnqueueSampler(Rows rows) {
  const Matrix logits = decoder_->EnqueueHead(rows, buffers_.sample_rows.device());
  Stamp(&StepStamps::head);
  backend_.Sample({.rows = rows,
                   .logits = logits,
                   .vocab = spec_.vocab,
                   .params = buffers_.params.device(),
                   .bias_ids = buffers_.bias_ids.device(),
                   .bias_values = buffers_.bias_values.device(),
                   .banned_ids = buffers_.banned_ids.device(),
                   .token_counts = counts_->device(),
                   .tokens = buffers_.tokens.device()});
  Stamp(&StepStamps::sampled);
}

// Prefill only, so the number of chunks may depend on the step.
void StepRunner::EnqueuePromptLogprobs() {
  const int chunk_rows = decoder_->options().head_rows;
  const int chunks = (plan_.prompt_rows() + chunk_rows - 1) / chunk_rows;
  for (int i = 0; i < chunks; ++i) {
    buffers_.prompt_counts[static_cast<size_t>(i)] =
        std::min(chunk_rows, plan_.prompt_rows() - i * chunk_rows);
  }
  buffers_.prompt_counts.Upload(backend_, static_cast<size_t>(chunks));
  for (int i = 0; i < chunks; ++i) {
    const Rows rows{.bound = chunk_rows, .count = buffers_.prompt_counts.device() + i};
    const auto first = static_cast<size_t>(i * chunk_rows);
    const Matrix logits = decoder_->EnqueueHead(rows, buffers_.prompt_rows.device() + first);
    backend_.Logprobs(buffers_.prompt.Args(rows, logits, spec_.vocab, first));
  }
}

void StepRunner::Download() {
  const auto samples = static_cast<size_t>(plan_.samples());
  buffers_.tokens.Download(backend_, samples);
  if (plan_.wants_logprobs()) buffers_.sampled.Download(backend_, samples);
  buffers_.prompt.Download(backend_, static_cast<size_t>(plan_.prompt_rows()));
  const size_t picks = static_cast<size_t>(plan_.extent()) * static_cast<size_t>(spec_.moe.top_k);
  const std::vector<RouterPicks>& layers = decoder_->picks();
  if (!layers.empty()) picks_.Download(backend_, layers[0].ids, picks);
  pipeline_->Download(backend_, buffers_, plan_);
  if (stream_ != nullptr) stream_->Download();
}

void StepRunner::CountPicks() {
  const auto top_k = static_cast<size_t>(spec_.moe.top_k);
  const int stride = HotExperts::CountedStride(plan_.rows());
  for (size_t layer = 0; layer < picks_.layers(); ++layer) {
    for (int row = 0; row < plan_.rows(); row += stride) {
      const auto place = static_cast<size_t>(plan_.place_of(row));
      hot_->Count(static_cast<int>(layer), {picks_[layer] + place * top_k, top_k});
    }
  }
  hot_->EndStep();
}

void StepRunner::ObserveStream() {
  const StepTimes& times = pipeline_->times();
  if (plan_.is_decode() || !times.measured) return;
  const auto layers = static_cast<double>(picks_.layers());
  hot_->ObserveStream({.rows = plan_.rows(),
                       .step_ns = static_cast<double>(times.step_ns),
                       .before_ns = static_cast<double>(times.before_ns) / layers,
                       .device_ns = static_cast<double>(times.beside_ns) / layers,
                       .experts_ns = static_cast<double>(times.experts_ns) / layers,
                       .overlaps = LanesOf(pipeline_->choice().policy) > 1});
}

bool StepRunner::IsFinite(const PlannedSequence& planned) const {
  if (planned.sample_index >= 0 && buffers_.tokens[static_cast<size_t>(planned.sample_index)] < 0) {
    return false;
  }
  const auto prompt = buffers_.prompt.logprobs.begin() + planned.prompt_begin;
  if (!std::all_of(prompt, prompt + planned.prompt_count,
                   [](float x) { return std::isfinite(x); })) {
    return false;
  }
  const auto top_k = static_cast<size_t>(spec_.moe.top_k);
  for (size_t layer = 0; layer < picks_.layers(); ++layer) {
    for (int row = planned.first_row; row < planned.first_row + planned.rows; ++row) {
      const auto place = static_cast<size_t>(plan_.place_of(row));
      if (picks_[layer][place * top_k] == kNoExpert) return false;
    }
  }
  return true;
}

void StepRunner::TraceStep(const Step& step) {
  StepStamps device = buffers_.step_stamps[0];
  if (plan_.samples() == 0) device.head = device.sampled = 0;  // of an earlier step
  trace_.End({.step = forwards_,
              .gateway_step = step.step_id(),
              .rows = plan_.rows(),
              .lanes = LanesOf(pipeline_->choice().policy),
              .logprobs = plan_.wants_logprobs() || plan_.prompt_rows() > 0,
              .device = device,
              .layers = buffers_.stamps.host(),
              .stream = stream_},
             link_);
}

void StepRunner::Commit(const Step& step, StepResult& result) {
  auto planned = plan_.sequences().begin();
  for (int i = 0; i < step.sequences_size(); ++i) {
    SequenceResult& out = *result.add_sequences();
    out.set_sequence_id(step.sequences(i).sequence_id());
    if (planned == plan_.sequences().end() || planned->step_index != i) {
      out.set_finish(worker::v1::WORKER_FINISH_INACTIVE);
      continue;
    }
    out.set_finish(CommitSequence(*planned, step.sequences(i), out));
    ++planned;
  }
}

WorkerFinish StepRunner::CommitSequence(const PlannedSequence& planned, const SequenceStep& step,
                                        SequenceResult& result) {
  if (!IsFinite(planned)) {
    table_.Deactivate(planned.slot);
    return worker::v1::WORKER_FINISH_NUMERIC_ERROR;
  }
  table_.Advance(planned.slot, step.start_position(), static_cast<uint32_t>(planned.rows));
  for (int i = 0; i < planned.prompt_count; ++i) {
    const auto row = static_cast<size_t>(planned.prompt_begin + i);
    FillLogprobs(buffers_.prompt, row, buffers_.prompt.targets[row], *result.add_prompt_logprobs());
  }
  if (planned.sample_index < 0) return worker::v1::WORKER_FINISH_NONE;
  const auto sample = static_cast<size_t>(planned.sample_index);
  const int32_t token = buffers_.tokens[sample];
  const Sequence& sequence = table_.at(planned.slot);
  result.add_token_ids(static_cast<uint32_t>(token));
  if (sequence.top_logprobs >= 0) {
    FillLogprobs(buffers_.sampled, sample, token, *result.add_logprobs());
  }
  if (sequence.has_penalties()) counts_->Add(backend_, planned.slot, token);
  return table_.TakeToken(planned.slot, token);
}

}  // namespace tandem::gpu
