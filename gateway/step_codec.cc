#include "gateway/step_codec.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace tandem::gateway {
namespace {

// Bounds of the worker (gpu_worker refuses the whole step beyond them).
constexpr size_t kMaxStopIds = 256;
constexpr size_t kMaxLogitBias = 1024;

// 2^26 blocks of 16 tokens are a billion tokens: more is a mistake, not a cache.
constexpr uint32_t kMaxBlocks = uint32_t{1} << 26;

bool HasPenalties(const SamplingOptions& sampling) {
  return sampling.presence_penalty != 0 || sampling.frequency_penalty != 0 ||
         sampling.repetition_penalty != 1;
}

void EncodeSampling(const GenerationRequest& request, worker::v1::Sampling* out) {
  const SamplingOptions& sampling = request.sampling;
  out->set_temperature(sampling.temperature);
  out->set_top_k(sampling.top_k);
  out->set_top_p(sampling.top_p);
  out->set_min_p(sampling.min_p);
  out->set_presence_penalty(sampling.presence_penalty);
  out->set_frequency_penalty(sampling.frequency_penalty);
  out->set_repetition_penalty(sampling.repetition_penalty);
  out->set_seed(sampling.seed);
  for (const auto& [token, bias] : sampling.logit_bias) (*out->mutable_logit_bias())[token] = bias;
  out->set_top_logprobs(request.top_logprobs ? static_cast<int32_t>(*request.top_logprobs) : -1);
}

// Tokens before a preemption count: `done` of them are out.
void EncodeStopping(const SequenceRules& rules, uint32_t done, worker::v1::Stopping* out) {
  const StopOptions& stopping = rules.request->stopping;
  std::set<uint32_t> stop_ids(stopping.stop_token_ids.begin(), stopping.stop_token_ids.end());
  if (!stopping.ignore_eos) stop_ids.insert(rules.end_ids.begin(), rules.end_ids.end());
  for (const uint32_t id : stop_ids) out->add_stop_token_ids(id);
  out->set_max_tokens(stopping.max_tokens - std::min(stopping.max_tokens, done));
  out->set_min_tokens(stopping.min_tokens - std::min(stopping.min_tokens, done));
}

void EncodeStart(const PlannedSequence& planned, const SequenceRules& rules,
                 worker::v1::SequenceStart* out) {
  const GenerationRequest& request = *rules.request;
  out->set_sequence_id(planned.worker_sequence);
  EncodeSampling(request, out->mutable_sampling());
  EncodeStopping(rules, static_cast<uint32_t>(planned.generated.size()), out->mutable_stopping());
  if (request.sampling.repetition_penalty != 1) {
    out->mutable_penalty_prompt_ids()->Add(request.prompt.begin(), request.prompt.end());
  }
  if (HasPenalties(request.sampling)) {
    out->mutable_penalty_output_ids()->Add(planned.generated.begin(), planned.generated.end());
  }
  out->set_prompt_logprobs(rules.wants_prompt_logprobs
                               ? static_cast<int32_t>(request.prompt_top_logprobs.value_or(0))
                               : -1);
}

void EncodeSequence(const PlannedSequence& planned, worker::v1::SequenceStep* out) {
  out->set_sequence_id(planned.worker_sequence);
  out->set_start_position(planned.start_position);
  if (planned.tokens.empty()) {
    out->set_last_sampled(true);
  } else {
    out->mutable_tokens()->mutable_ids()->Add(planned.tokens.begin(), planned.tokens.end());
  }
  for (uint32_t g = 0; g < planned.appended.size(); ++g) {
    if (planned.appended[g].empty()) continue;
    worker::v1::BlockAppend* append = out->add_block_appends();
    append->set_cache_group(g);
    append->mutable_block_ids()->Add(planned.appended[g].begin(), planned.appended[g].end());
  }
  out->set_sample(planned.sample);
  if (planned.next_prompt_id) out->set_next_prompt_id(*planned.next_prompt_id);
}

WorkerEnd DecodeEnd(worker::v1::WorkerFinish finish) {
  switch (finish) {
    case worker::v1::WORKER_FINISH_STOP_TOKEN:
      return WorkerEnd::kStopToken;
    case worker::v1::WORKER_FINISH_MAX_TOKENS:
      return WorkerEnd::kMaxTokens;
    case worker::v1::WORKER_FINISH_NUMERIC_ERROR:
      return WorkerEnd::kNumericError;
    case worker::v1::WORKER_FINISH_INACTIVE:
      return WorkerEnd::kInactive;
    default:
      return WorkerEnd::kNone;
  }
}

absl::Status Invalid(const std::string& what) { return absl::InvalidArgumentError(what); }

absl::Status CheckSampling(const SamplingOptions& s, uint32_t vocab_size) {
  // Written so that NaN fails.
  if (!(s.temperature >= 0 && std::isfinite(s.temperature))) {
    return Invalid("temperature must be a number >= 0");
  }
  if (!(s.top_p > 0 && s.top_p <= 1)) return Invalid("top_p must be in (0, 1]");
  if (!(s.min_p >= 0 && s.min_p <= 1)) return Invalid("min_p must be in [0, 1]");
  if (!(s.repetition_penalty > 0 && std::isfinite(s.repetition_penalty))) {
    return Invalid("repetition_penalty must be a number > 0");
  }
  if (!std::isfinite(s.presence_penalty)) return Invalid("presence_penalty must be a number");
  if (!std::isfinite(s.frequency_penalty)) return Invalid("frequency_penalty must be a number");
  if (s.logit_bias.size() > kMaxLogitBias) {
    return Invalid(absl::StrCat("logit_bias has ", s.logit_bias.size(), " entries, at most ",
                                kMaxLogitBias, " are allowed"));
  }
  for (const auto& [token, bias] : s.logit_bias) {
    if (token >= vocab_size) {
      return Invalid(
          absl::StrCat("logit_bias names token ", token, ", the vocabulary has ", vocab_size));
    }
    if (!std::isfinite(bias)) return Invalid("logit_bias must hold numbers");
  }
  return absl::OkStatus();
}

}  // namespace

worker::v1::StepRequest EncodeStep(const StepPlan& plan, uint64_t epoch,
                                   const std::function<SequenceRules(RequestId)>& rules_of) {
  worker::v1::StepRequest request;
  worker::v1::Step* step = request.mutable_step();
  step->set_step_id(plan.step_id);
  step->set_epoch(epoch);
  step->set_target_us(static_cast<uint64_t>(plan.target_ns / 1000));
  step->mutable_release_sequence_ids()->Add(plan.released.begin(), plan.released.end());
  for (const PlannedSequence& planned : plan.sequences) {
    if (planned.start) EncodeStart(planned, rules_of(planned.request), step->add_starts());
    EncodeSequence(planned, step->add_sequences());
  }
  return request;
}

std::vector<SequenceOutcome> DecodeOutcomes(const worker::v1::StepResult& result) {
  std::vector<SequenceOutcome> outcomes;
  outcomes.reserve(static_cast<size_t>(result.sequences_size()));
  for (const worker::v1::SequenceResult& sequence : result.sequences()) {
    outcomes.push_back({.worker_sequence = sequence.sequence_id(),
                        .tokens = {sequence.token_ids().begin(), sequence.token_ids().end()},
                        .end = DecodeEnd(sequence.finish())});
  }
  return outcomes;
}

TokenLogprob DecodeLogprob(const worker::v1::TokenLogprobs& message) {
  TokenLogprob logprob;
  logprob.token_id = message.token_id();
  logprob.logprob = message.logprob();
  logprob.rank = message.rank();
  const int count = std::min(message.top_ids_size(), message.top_logprobs_size());
  for (int i = 0; i < count; ++i) {
    logprob.top.push_back({.token_id = message.top_ids(i), .logprob = message.top_logprobs(i)});
  }
  return logprob;
}

absl::StatusOr<CapacityLimits> DecodeCapacity(const worker::v1::ModelInfo& info) {
  if (info.vocab_size() == 0 || info.max_context_tokens() == 0 || info.max_step_rows() == 0 ||
      info.max_sequences() == 0 || info.cache_groups().empty()) {
    return absl::InternalError("the worker reports a model without vocabulary, context or cache");
  }
  CapacityLimits limits{.max_context_tokens = info.max_context_tokens(), .groups = {}};
  for (const worker::v1::CacheGroup& group : info.cache_groups()) {
    const bool keeps_all = group.kind() == worker::v1::CACHE_KIND_FULL ||
                           group.kind() == worker::v1::CACHE_KIND_INDEXER;
    if (!keeps_all && group.kind() != worker::v1::CACHE_KIND_WINDOW) {
      return absl::UnimplementedError(absl::StrCat("the worker's cache group is of kind ",
                                                   worker::v1::CacheKind_Name(group.kind()),
                                                   ", which the scheduler does not know"));
    }
    if (group.block_tokens() == 0 || group.block_count() == 0 || group.block_count() > kMaxBlocks) {
      return absl::InternalError(absl::StrCat("the worker reports ", group.block_count(),
                                              " blocks of ", group.block_tokens(), " tokens"));
    }
    limits.groups.push_back({.block_tokens = group.block_tokens(),
                             .block_count = group.block_count(),
                             .keeps_all_tokens = keeps_all});
  }
  return limits;
}

absl::Status CheckRequest(const GenerationRequest& request, const ServedModel& model) {
  if (request.prompt.empty()) return Invalid("the prompt has no tokens");
  const auto outside = [&](uint32_t id) { return id >= model.vocab_size; };
  if (std::any_of(request.prompt.begin(), request.prompt.end(), outside)) {
    return Invalid(
        absl::StrCat("the prompt has a token id outside the vocabulary of ", model.vocab_size));
  }
  const StopOptions& stopping = request.stopping;
  if (std::any_of(stopping.stop_token_ids.begin(), stopping.stop_token_ids.end(), outside)) {
    return Invalid("stop_token_ids has an id outside the vocabulary");
  }
  if (stopping.stop_token_ids.size() + model.end_ids.size() > kMaxStopIds) {
    return Invalid(absl::StrCat("stop_token_ids has ", stopping.stop_token_ids.size(),
                                " ids, at most ", kMaxStopIds - model.end_ids.size(),
                                " are allowed"));
  }
  if (stopping.min_tokens > stopping.max_tokens) return Invalid("min_tokens exceeds max_tokens");
  if (request.top_logprobs.value_or(0) > model.max_logprobs ||
      request.prompt_top_logprobs.value_or(0) > model.max_logprobs) {
    return Invalid(absl::StrCat("at most ", model.max_logprobs, " logprobs a token are reported"));
  }
  return CheckSampling(request.sampling, model.vocab_size);
}

}  // namespace tandem::gateway
