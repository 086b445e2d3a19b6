#include "gateway/open_request.h"

#include <utility>

#include "gateway/step_codec.h"

namespace tandem::gateway {

void OpenRequest::Start(int64_t now_ns) {
  if (started_ns_ == 0) started_ns_ = now_ns;
  // The prompt is computed again from the beginning.
  if (!prompt_done_) prompt_logprobs_.clear();
}

GenerationEvent OpenRequest::Counts() const {
  GenerationEvent event;
  event.prompt_tokens = static_cast<uint32_t>(request_.prompt.size());
  event.completion_tokens = completion_tokens_;
  event.cached_tokens = cached_tokens_;
  return event;
}

std::optional<GenerationEvent> OpenRequest::Advance(const Progress& progress,
                                                    const worker::v1::SequenceResult& result,
                                                    int64_t now_ns, EngineMetrics* metrics) {
  const bool collects = wants_prompt_logprobs();
  if (collects) {
    for (const auto& logprob : result.prompt_logprobs()) {
      prompt_logprobs_.push_back(DecodeLogprob(logprob));
    }
  }
  if (progress.prompt_done && !prompt_done_) {
    prompt_done_ = true;
    cached_tokens_ = progress.cached_tokens;
    if (request_.prompt_top_logprobs == std::nullopt) {
      metrics->CountPrefix(static_cast<uint32_t>(request_.prompt.size()), cached_tokens_);
    }
  }
  if (progress.tokens.empty() && progress.end == SequenceEnd::kNone) return std::nullopt;

  GenerationEvent event;
  TakeTokens(progress, now_ns, metrics, &event);
  if (request_.top_logprobs && result.logprobs_size() == result.token_ids_size()) {
    for (const auto& logprob : result.logprobs()) event.logprobs.push_back(DecodeLogprob(logprob));
  }
  event.prompt_logprobs = std::exchange(prompt_logprobs_, {});
  const GenerationEvent counts = Counts();
  event.prompt_tokens = counts.prompt_tokens;
  event.completion_tokens = counts.completion_tokens;
  event.cached_tokens = counts.cached_tokens;
  Finish(progress, &event);
  return event;
}

void OpenRequest::TakeTokens(const Progress& progress, int64_t now_ns, EngineMetrics* metrics,
                             GenerationEvent* event) {
  if (progress.tokens.empty()) return;
  if (completion_tokens_ == 0) {
    metrics->ObserveFirstToken(now_ns - submitted_ns_);
  } else {
    metrics->ObserveTokenGap(now_ns - last_token_ns_);
  }
  last_token_ns_ = now_ns;
  metrics->CountGenerated(static_cast<uint32_t>(progress.tokens.size()));
  event->token_ids = progress.tokens;
  for (size_t i = 0; i < progress.tokens.size(); ++i) {
    ++completion_tokens_;
    const bool is_stop_token =
        progress.end == SequenceEnd::kStopToken && i + 1 == progress.tokens.size();
    if (sink_ == nullptr || is_stop_token) continue;
    const bool may_stop = completion_tokens_ > request_.stopping.min_tokens;
    if (sink_->Append(progress.tokens[i], may_stop, &event->text)) break;
  }
}

void OpenRequest::Finish(const Progress& progress, GenerationEvent* event) {
  std::optional<std::string> matched = sink_ ? sink_->matched() : std::nullopt;
  if (!matched && progress.end != SequenceEnd::kNone && sink_) {
    sink_->Flush(&event->text);
    matched = sink_->matched();
  }
  if (matched) {
    event->finished = true;
    event->reason = FinishReason::kStop;
    event->matched_stop = *matched;
    return;
  }
  switch (progress.end) {
    case SequenceEnd::kNone:
      return;
    case SequenceEnd::kStopToken:
      event->reason = FinishReason::kStop;
      event->matched_stop_token = progress.tokens.back();
      break;
    case SequenceEnd::kLength:
      event->reason = FinishReason::kLength;
      break;
    case SequenceEnd::kNumericError:
      event->reason = FinishReason::kError;
      event->error = absl::InternalError(
          "the model's numbers for this request are not finite; see the gpu_worker's log");
      break;
  }
  event->finished = true;
}

GenerationEvent OpenRequest::End(FinishReason reason, absl::Status error) const {
  GenerationEvent event = Counts();
  event.finished = true;
  event.reason = reason;
  event.error = std::move(error);
  return event;
}

RequestFigures OpenRequest::Figures(FinishReason reason, int64_t now_ns) const {
  return {.reason = reason,
          .submitted_ns = submitted_ns_,
          .started_ns = started_ns_,
          .ended_ns = now_ns,
          .prompt_tokens = static_cast<uint32_t>(request_.prompt.size()),
          .completion_tokens = completion_tokens_};
}

}  // namespace tandem::gateway
