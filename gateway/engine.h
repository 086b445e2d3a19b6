#pragma once

// The gateway's core as its front ends see it: a request of token ids goes in, events come out.
// Front ends (gateway/api) parse and validate their dialect, tokenize, call Engine::Submit and turn
// events into their wire format; the engine queues, schedules, talks to the gpu_worker, detokenizes
// and matches stop strings. It knows neither HTTP nor gRPC.
//
// Thread safety: all methods of Engine may be called from any thread. Events of one request come
// one at a time, in order, from an engine thread; a listener must not block (hand the event over)
// and may call Cancel. Exactly one event with `finished` ends every accepted request; after it the
// listener is released.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::gateway {

struct SamplingOptions {
  float temperature = 1;
  uint32_t top_k = 0;  // 0: off
  float top_p = 1;
  float min_p = 0;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  float repetition_penalty = 1;
  uint64_t seed = 0;
  std::map<uint32_t, float> logit_bias;
};

struct StopOptions {
  uint32_t max_tokens = 0;  // REQUIRES: prompt + max_tokens within the context
  uint32_t min_tokens = 0;
  std::vector<std::string> stop_strings;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;
};

struct GenerationRequest {
  std::string request_id;
  std::string tenant;  // separates the prefix cache; derived from the API key
  std::vector<uint32_t> prompt;
  SamplingOptions sampling;
  StopOptions stopping;
  std::optional<uint32_t> top_logprobs;  // of generated tokens
  std::optional<uint32_t>
      prompt_top_logprobs;          // of prompt tokens 1 ...; turns the prefix cache off
  bool skip_special_tokens = true;  // in text deltas
  bool detokenize = true;           // false where the model has no tokenizer
};

struct TopLogprob {
  uint32_t token_id = 0;
  float logprob = 0;
};

struct TokenLogprob {
  uint32_t token_id = 0;
  float logprob = 0;
  uint32_t rank = 0;
  std::vector<TopLogprob> top;
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kError, kCancelled };

struct GenerationEvent {
  std::string text;                    // certain text since the last event
  std::vector<uint32_t> token_ids;     // generated since the last event
  std::vector<TokenLogprob> logprobs;  // one a token of token_ids, where asked for
  std::vector<TokenLogprob>
      prompt_logprobs;  // once, before the first token: prompt positions 1 ...
  bool finished = false;
  FinishReason reason = FinishReason::kNone;
  std::string matched_stop;  // the stop string that ended it
  std::optional<uint32_t> matched_stop_token;
  absl::Status error;          // with kError
  uint32_t prompt_tokens = 0;  // counts are cumulative, in every event
  uint32_t completion_tokens = 0;
  uint32_t cached_tokens = 0;
};

class GenerationListener {
 public:
  virtual ~GenerationListener() = default;
  virtual void OnEvent(GenerationEvent event) = 0;
};

// What is served; constant while the worker's epoch lasts.
struct ServedModel {
  std::string name;
  std::string model_type;
  uint32_t vocab_size = 0;
  uint32_t max_context_tokens = 0;
  uint32_t max_logprobs = 0;
  bool parity = false;
  std::vector<uint32_t> end_ids;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Queues a request. Errors: RESOURCE_EXHAUSTED (queue full by requests or tokens, or can never
  // fit the KV cache), UNAVAILABLE (loading, draining or worker lost), INVALID_ARGUMENT. Events may
  // come before Submit returns.
  virtual absl::StatusOr<uint64_t> Submit(GenerationRequest request,
                                          std::shared_ptr<GenerationListener> listener) = 0;
  // The client left: ends the request with kCancelled and frees its blocks within a step.
  virtual void Cancel(uint64_t handle) = 0;

  // Ready: model loaded, worker alive and making progress, not draining.
  virtual absl::Status Ready() const = 0;
  // Tells `listener` whether the worker serves: at once, then at every change before Ready shows
  // it, so that a health service is never behind. It is called under a lock and must not call the
  // engine; an empty one ends it.
  virtual void FollowServing(std::function<void(bool)> listener) = 0;
  virtual std::optional<ServedModel> Model() const = 0;
  // Refuses new requests from now on; returns when the admitted ones are done or the time is over.
  virtual void Drain(int64_t timeout_ms) = 0;
};

}  // namespace tandem::gateway
