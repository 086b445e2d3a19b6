#pragma once

// One accepted request between its acceptance and its terminal event: turns what the worker
// generated into events (text, stop strings, logprobs, counts) and remembers times for the metrics.
//
// A token that is accepted counts, also the one whose text ended the request; the stop token counts
// and has no text. Thread safety: one owner, the engine thread.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gateway/engine.h"
#include "gateway/engine_metrics.h"
#include "gateway/scheduling/scheduler.h"
#include "gateway/text_sink.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gateway {

class OpenRequest {
 public:
  OpenRequest(uint64_t handle, GenerationRequest request,
              std::shared_ptr<GenerationListener> listener, std::unique_ptr<TextSink> sink,
              int64_t now_ns)
      : handle_(handle),
        request_(std::move(request)),
        listener_(std::move(listener)),
        sink_(std::move(sink)),
        submitted_ns_(now_ns) {}

  uint64_t handle() const { return handle_; }
  const GenerationRequest& request() const { return request_; }
  const std::shared_ptr<GenerationListener>& listener() const { return listener_; }
  bool started() const { return started_ns_ != 0; }
  // Prompt logprobs are still to be collected, from the first position on.
  bool wants_prompt_logprobs() const { return request_.prompt_top_logprobs && !prompt_done_; }

  // A step with its first prompt chunk was planned; also again after a preemption.
  void Start(int64_t now_ns);
  // The event of a finished step, if there is anything to tell. An event with `finished` is the
  // last.
  std::optional<GenerationEvent> Advance(const Progress& progress,
                                         const worker::v1::SequenceResult& result, int64_t now_ns,
                                         EngineMetrics* metrics);
  // The terminal event of a request that ends for another reason.
  GenerationEvent End(FinishReason reason, absl::Status error) const;

  RequestFigures Figures(FinishReason reason, int64_t now_ns) const;

 private:
  void TakeTokens(const Progress& progress, int64_t now_ns, EngineMetrics* metrics,
                  GenerationEvent* event);
  void Finish(const Progress& progress, GenerationEvent* event);
  GenerationEvent Counts() const;

  const uint64_t handle_;
  const GenerationRequest request_;
  const std::shared_ptr<GenerationListener> listener_;
  const std::unique_ptr<TextSink> sink_;  // null: token ids only
  const int64_t submitted_ns_;
  int64_t started_ns_ = 0;
  int64_t last_token_ns_ = 0;
  uint32_t completion_tokens_ = 0;
  uint32_t cached_tokens_ = 0;
  bool prompt_done_ = false;
  std::vector<TokenLogprob> prompt_logprobs_;
};

}  // namespace tandem::gateway
