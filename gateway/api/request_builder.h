#pragma once

// From a request as a client means it to requests as the engine wants them; shared by all front
// ends. A front end parses its dialect into GenerationFields and prompts; the builder applies the
// model's defaults, renders chat templates, tokenizes, checks every range against the model and
// expands `n` choices.
//
// Everything a client can get wrong is found here, before anything is queued: errors are
// INVALID_ARGUMENT with the field's OpenAI name as param (api_error.h), NOT_FOUND for another
// model's name, UNAVAILABLE while the model loads; too long a prompt has code
// context_length_exceeded.
//
// Thread safety: const methods may run concurrently; Tokenize blocks (template rendering), so it is
// called from a worker thread, never from an I/O thread. The tokenizer, template and engine are
// borrowed; the first two may be null (a model without a usable tokenizer: token ids in and out).

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/engine.h"
#include "gateway/text/chat_template.h"
#include "gateway/text/tokenizer.h"

namespace tandem::gateway {

struct ChatPrompt {
  std::string messages_json;  // an array; content is text or null, roles as templates know them
  std::string kwargs_json;    // an object, or empty
  bool add_generation_prompt = true;
};

struct TextPrompt {
  std::string text;
  bool add_special_tokens = true;
};

using Prompt = std::variant<ChatPrompt, TextPrompt, std::vector<uint32_t>>;

// Sampling, stopping and output fields; absent means the default.
struct GenerationFields {
  std::string prompt_name = "prompt";  // what the client called it, for errors

  std::optional<double> temperature;
  std::optional<int64_t> top_k;  // -1 and 0: off
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> presence_penalty;
  std::optional<double> frequency_penalty;
  std::optional<double> repetition_penalty;
  std::optional<int64_t> seed;
  std::vector<std::pair<int64_t, double>> logit_bias;  // (token id, bias)

  std::optional<int64_t> max_tokens;
  std::string max_tokens_name = "max_tokens";  // what the client called it
  std::optional<int64_t> min_tokens;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;

  std::optional<int64_t> n;
  std::optional<int64_t> top_logprobs;  // present: logprobs are reported
  std::string top_logprobs_name = "top_logprobs";
  bool prompt_logprobs = false;  // of the prompt too, with as many alternatives
  bool skip_special_tokens = true;
};

// Values that apply where a request gives none: those of the model's generation_config.json.
struct GenerationDefaults {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
};

struct BuilderLimits {
  uint32_t max_logprobs = 20;
  uint32_t max_choices = 256;  // prompts x n of one request
  uint32_t max_stop_strings = 64;
  uint32_t max_stop_bytes = 4096;
  uint32_t max_logit_bias = 1024;
};

// One client request, ready for the engine: choice i of prompt p is requests[p * n + i].
struct BuiltRequest {
  std::vector<GenerationRequest> requests;
  size_t choices_per_prompt = 1;
  // The client asked for no new token (only the prompt's logprobs); the engine still makes one.
  bool discard_output = false;
};

// Ranges of the sampling fields (NaN included) and logit_bias against the vocabulary.
absl::StatusOr<SamplingOptions> BuildSampling(const GenerationFields& fields,
                                              const GenerationDefaults& defaults,
                                              uint32_t vocab_size);

class RequestBuilder {
 public:
  RequestBuilder(const Engine* engine, const Tokenizer* tokenizer,
                 const ChatTemplate* chat_template, GenerationDefaults defaults,
                 BuilderLimits limits);

  // The served model, if `requested` is empty or its name.
  absl::StatusOr<ServedModel> Model(std::string_view requested) const;

  // `param` names the prompt's field in errors ("prompt[2]", "messages").
  absl::StatusOr<std::vector<uint32_t>> Tokenize(const Prompt& prompt,
                                                 std::string_view param) const;

  // The text of `ids`.
  absl::StatusOr<std::string> Detokenize(const std::vector<uint32_t>& ids,
                                         bool skip_special_tokens) const;

  absl::StatusOr<BuiltRequest> Build(const ServedModel& model, const GenerationFields& fields,
                                     std::vector<std::vector<uint32_t>> prompts,
                                     std::string_view request_id, std::string_view tenant) const;

  const Tokenizer* tokenizer() const { return tokenizer_; }
  const ChatTemplate* chat_template() const { return chat_template_; }
  const GenerationDefaults& defaults() const { return defaults_; }

 private:
  absl::StatusOr<StopOptions> BuildStopping(const ServedModel& model,
                                            const GenerationFields& fields,
                                            size_t prompt_tokens) const;
  absl::Status CheckStops(const ServedModel& model, const GenerationFields& fields) const;

  const Engine* engine_;
  const Tokenizer* tokenizer_;
  const ChatTemplate* chat_template_;
  GenerationDefaults defaults_;
  BuilderLimits limits_;
};

}  // namespace tandem::gateway
