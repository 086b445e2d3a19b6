#include "gateway/api/request_builder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/api/api_error.h"

namespace tandem::gateway {
namespace {

constexpr double kMaxTemperature = 100;
constexpr double kMaxPenalty = 2;
constexpr double kMaxRepetitionPenalty = 100;
constexpr double kMaxBias = 100;

// `value` where the client gave none is the default and needs no check. The comparison is written
// so that NaN fails it.
absl::Status CheckRange(std::string_view name, const std::optional<double>& value, double low,
                        double high) {
  if (!value || (*value >= low && *value <= high)) return absl::OkStatus();
  return FieldError(name, absl::StrCat(std::string(name), " must be between ", low, " and ", high));
}

absl::Status CheckSamplingRanges(const GenerationFields& fields) {
  RETURN_IF_ERROR(CheckRange("temperature", fields.temperature, 0, kMaxTemperature));
  RETURN_IF_ERROR(CheckRange("top_p", fields.top_p, 0, 1));
  RETURN_IF_ERROR(CheckRange("min_p", fields.min_p, 0, 1));
  RETURN_IF_ERROR(
      CheckRange("presence_penalty", fields.presence_penalty, -kMaxPenalty, kMaxPenalty));
  RETURN_IF_ERROR(
      CheckRange("frequency_penalty", fields.frequency_penalty, -kMaxPenalty, kMaxPenalty));
  const std::optional<double>& repetition = fields.repetition_penalty;
  if (repetition && !(*repetition > 0 && *repetition <= kMaxRepetitionPenalty)) {
    return FieldError("repetition_penalty", "repetition_penalty must be above 0 and at most 100");
  }
  if (fields.top_k && *fields.top_k < -1) {
    return FieldError("top_k", "top_k must be at least 1, or 0 or -1 for all tokens");
  }
  return absl::OkStatus();
}

uint64_t RandomSeed() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return generator();
}

absl::Status ContextError(size_t prompt_tokens, int64_t max_tokens, uint32_t limit,
                          std::string_view param) {
  const std::string message = absl::StrCat(
      "The maximum context length is ", limit, " tokens, but the prompt has ", prompt_tokens,
      " tokens and ", max_tokens, " more were requested (", prompt_tokens + max_tokens,
      " in all). Shorten the prompt or request fewer tokens.");
  return WithCode(FieldError(param, message), "context_length_exceeded");
}

absl::Status CheckPrompts(const ServedModel& model, const std::string& name,
                          const std::vector<std::vector<uint32_t>>& prompts) {
  for (const std::vector<uint32_t>& prompt : prompts) {
    if (prompt.empty()) {
      return FieldError(name, "The prompt is empty: it must make at least one token.");
    }
    for (const uint32_t id : prompt) {
      if (id >= model.vocab_size) {
        return FieldError(name, absl::StrCat(name, ": token id ", id,
                                             " is outside the vocabulary of ", model.vocab_size));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SamplingOptions> BuildSampling(const GenerationFields& fields,
                                              const GenerationDefaults& defaults,
                                              uint32_t vocab_size) {
  RETURN_IF_ERROR(CheckSamplingRanges(fields));
  SamplingOptions sampling;
  sampling.temperature = static_cast<float>(fields.temperature.value_or(defaults.temperature));
  sampling.top_p = static_cast<float>(fields.top_p.value_or(defaults.top_p));
  sampling.min_p = static_cast<float>(fields.min_p.value_or(defaults.min_p));
  sampling.presence_penalty = static_cast<float>(fields.presence_penalty.value_or(0));
  sampling.frequency_penalty = static_cast<float>(fields.frequency_penalty.value_or(0));
  sampling.repetition_penalty =
      static_cast<float>(fields.repetition_penalty.value_or(defaults.repetition_penalty));
  const int64_t top_k = std::max<int64_t>(fields.top_k.value_or(defaults.top_k), 0);
  sampling.top_k = top_k >= int64_t{vocab_size} ? 0 : static_cast<uint32_t>(top_k);
  if (sampling.top_p <= 0) {
    // No probability mass: only the likeliest token is left.
    sampling.top_p = 1;
    sampling.top_k = 1;
  }
  // Seeds are any 64 bits; the sign has no meaning.
  sampling.seed = fields.seed ? static_cast<uint64_t>(*fields.seed) : RandomSeed();
  for (const auto& [id, bias] : fields.logit_bias) {
    if (id < 0 || id >= int64_t{vocab_size}) {
      return FieldError("logit_bias", absl::StrCat("logit_bias: token id ", id,
                                                   " is outside the vocabulary of ", vocab_size));
    }
    if (!(std::abs(bias) <= kMaxBias)) {
      return FieldError("logit_bias", "logit_bias: a bias must be between -100 and 100");
    }
    sampling.logit_bias[static_cast<uint32_t>(id)] = static_cast<float>(bias);
  }
  return sampling;
}

RequestBuilder::RequestBuilder(const Engine* engine, const Tokenizer* tokenizer,
                               const ChatTemplate* chat_template, GenerationDefaults defaults,
                               BuilderLimits limits)
    : engine_(engine),
      tokenizer_(tokenizer),
      chat_template_(chat_template),
      defaults_(defaults),
      limits_(limits) {}

absl::StatusOr<ServedModel> RequestBuilder::Model(std::string_view requested) const {
  std::optional<ServedModel> model = engine_->Model();
  if (!model) {
    const absl::Status ready = engine_->Ready();
    return ready.ok() ? absl::UnavailableError("The model is still loading.") : ready;
  }
  if (!requested.empty() && requested != model->name) {
    absl::Status status =
        absl::NotFoundError(absl::StrCat("The model `", std::string(requested.substr(0, 200)),
                                         "` does not exist; `", model->name, "` is served here."));
    return WithCode(WithParam(std::move(status), "model"), "model_not_found");
  }
  return *std::move(model);
}

absl::StatusOr<std::vector<uint32_t>> RequestBuilder::Tokenize(const Prompt& prompt,
                                                               std::string_view param) const {
  if (const auto* ids = std::get_if<std::vector<uint32_t>>(&prompt)) return *ids;
  if (tokenizer_ == nullptr) {
    return FieldError(param, "This model has no tokenizer: send token ids.");
  }
  absl::StatusOr<std::vector<uint32_t>> ids;
  if (const auto* text = std::get_if<TextPrompt>(&prompt)) {
    ids = tokenizer_->Encode(text->text, {.add_special_tokens = text->add_special_tokens});
  } else {
    if (chat_template_ == nullptr) {
      return FieldError(param, "This model has no chat template: use a text prompt.");
    }
    const auto& chat = std::get<ChatPrompt>(prompt);
    ChatRequest request;
    request.messages_json = chat.messages_json;
    request.kwargs_json = chat.kwargs_json;
    request.add_generation_prompt = chat.add_generation_prompt;
    const absl::StatusOr<PromptText> rendered = chat_template_->Render(request);
    ids = rendered.ok() ? tokenizer_->Encode(*rendered, {}) : rendered.status();
  }
  if (ids.ok()) return ids;
  // What the template or the tokenizer refuses is the prompt's fault; the rest is ours or passes.
  const absl::StatusCode code = ids.status().code();
  if (code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kFailedPrecondition) {
    return FieldError(param, std::string(ids.status().message()));
  }
  return ids.status();
}

absl::StatusOr<std::string> RequestBuilder::Detokenize(const std::vector<uint32_t>& ids,
                                                       bool skip_special_tokens) const {
  if (tokenizer_ == nullptr) return FieldError("tokens", "This model has no tokenizer.");
  return tokenizer_->Decode(ids, {.skip_special = skip_special_tokens});
}

absl::Status RequestBuilder::CheckStops(const ServedModel& model,
                                        const GenerationFields& fields) const {
  if (fields.stop.size() > limits_.max_stop_strings) {
    return FieldError(
        "stop", absl::StrCat("stop: at most ", limits_.max_stop_strings, " strings are accepted"));
  }
  for (const std::string& stop : fields.stop) {
    if (stop.empty()) return FieldError("stop", "stop: an empty string cannot be a stop string");
    if (stop.size() > limits_.max_stop_bytes) {
      return FieldError(
          "stop", absl::StrCat("stop: a string is longer than ", limits_.max_stop_bytes, " bytes"));
    }
  }
  if (!fields.stop.empty() && tokenizer_ == nullptr) {
    return FieldError("stop", "This model has no tokenizer: use stop_token_ids.");
  }
  for (const uint32_t id : fields.stop_token_ids) {
    if (id >= model.vocab_size) {
      return FieldError("stop_token_ids",
                        absl::StrCat("stop_token_ids: token id ", id,
                                     " is outside the vocabulary of ", model.vocab_size));
    }
  }
  if (fields.stop_token_ids.size() > limits_.max_logit_bias) {
    return FieldError("stop_token_ids", "stop_token_ids has too many entries");
  }
  return absl::OkStatus();
}

absl::StatusOr<StopOptions> RequestBuilder::BuildStopping(const ServedModel& model,
                                                          const GenerationFields& fields,
                                                          size_t prompt_tokens) const {
  const int64_t limit = model.max_context_tokens;
  const int64_t left = limit - static_cast<int64_t>(prompt_tokens);
  const std::string& name = fields.max_tokens_name;
  // A request for 0 tokens only wants its prompt scored; the engine makes one all the same.
  const int64_t wanted =
      std::max<int64_t>(fields.max_tokens.value_or(std::max<int64_t>(left, 1)), 1);
  if (fields.max_tokens && *fields.max_tokens < 0) {
    return FieldError(name, absl::StrCat(name, " must be at least 0"));
  }
  if (wanted > left) {
    const bool prompt_alone = left < 1;
    return ContextError(prompt_tokens, wanted, model.max_context_tokens,
                        prompt_alone ? fields.prompt_name : name);
  }
  StopOptions stopping;
  stopping.max_tokens = static_cast<uint32_t>(wanted);
  const int64_t min_tokens = fields.min_tokens.value_or(0);
  if (min_tokens < 0 || min_tokens > wanted) {
    return FieldError("min_tokens",
                      absl::StrCat("min_tokens must be between 0 and ", name, " (", wanted, ")"));
  }
  stopping.min_tokens = static_cast<uint32_t>(min_tokens);
  RETURN_IF_ERROR(CheckStops(model, fields));
  stopping.stop_strings = fields.stop;
  stopping.stop_token_ids = fields.stop_token_ids;
  stopping.ignore_eos = fields.ignore_eos;
  return stopping;
}

absl::StatusOr<BuiltRequest> RequestBuilder::Build(const ServedModel& model,
                                                   const GenerationFields& fields,
                                                   std::vector<std::vector<uint32_t>> prompts,
                                                   std::string_view request_id,
                                                   std::string_view tenant) const {
  RETURN_IF_ERROR(CheckPrompts(model, fields.prompt_name, prompts));
  const int64_t n = fields.n.value_or(1);
  const int64_t choices = limits_.max_choices;
  if (n < 1 || n > choices || n * static_cast<int64_t>(prompts.size()) > choices) {
    return FieldError("n", absl::StrCat("n must be at least 1, and n times the number of prompts "
                                        "at most ",
                                        limits_.max_choices));
  }
  if (fields.logit_bias.size() > limits_.max_logit_bias) {
    return FieldError("logit_bias", absl::StrCat("logit_bias: at most ", limits_.max_logit_bias,
                                                 " entries are accepted"));
  }
  const uint32_t max_logprobs = std::min(limits_.max_logprobs, model.vocab_size);
  if (fields.top_logprobs && (*fields.top_logprobs < 0 || *fields.top_logprobs > max_logprobs)) {
    return FieldError(
        fields.top_logprobs_name,
        absl::StrCat(fields.top_logprobs_name, " must be between 0 and ", max_logprobs));
  }
  GenerationRequest request;
  ASSIGN_OR_RETURN(request.sampling, BuildSampling(fields, defaults_, model.vocab_size));
  if (fields.top_logprobs) {
    request.top_logprobs = static_cast<uint32_t>(*fields.top_logprobs);
    if (fields.prompt_logprobs) request.prompt_top_logprobs = request.top_logprobs;
  }
  request.request_id = std::string(request_id);
  request.tenant = std::string(tenant);
  request.skip_special_tokens = fields.skip_special_tokens;
  request.detokenize = tokenizer_ != nullptr;

  BuiltRequest built;
  built.choices_per_prompt = static_cast<size_t>(n);
  built.discard_output = fields.max_tokens == 0;
  for (std::vector<uint32_t>& prompt : prompts) {
    ASSIGN_OR_RETURN(request.stopping, BuildStopping(model, fields, prompt.size()));
    request.prompt = std::move(prompt);
    for (int64_t i = 0; i < n; ++i) {
      built.requests.push_back(request);
      built.requests.back().sampling.seed += static_cast<uint64_t>(i);
    }
  }
  return built;
}

}  // namespace tandem::gateway
