#include "gateway/api/openai_request.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/api/api_error.h"

namespace tandem::gateway {
namespace {

// Fields that constrain or change the answer in ways that are not served; ignoring them would give
// a wrong answer with status 200.
constexpr std::array<std::string_view, 14> kUnservedFields = {
    "guided_json",   "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "grammar",       "json_schema",  "regex",         "ebnf",           "audio",
    "chat_template", "documents",    "suffix",        "best_of"};

bool IsNeutral(const Json& value) {
  return value == false || value == 1 ||
         ((value.is_array() || value.is_object()) && value.empty()) ||
         (value.is_string() && value.get_ref<const std::string&>().empty());
}

void RefuseUnserved(FieldReader& reader) {
  for (const std::string_view field : kUnservedFields) {
    const Json* const value = reader.Find(field);
    if (value != nullptr && !IsNeutral(*value)) reader.Fail(field, "is not supported");
  }
}

// tools and their relatives: empty ones are what frameworks send by default.
void RefuseTools(FieldReader& reader) {
  for (const std::string_view field : {"tools", "functions"}) {
    const Json* const value = reader.Find(field);
    if (value == nullptr) continue;
    if (!value->is_array()) {
      reader.Fail(field, "must be an array");
    } else if (!value->empty()) {
      reader.Fail(field, "is not supported: only an empty list is accepted");
    }
  }
  for (const std::string_view field : {"tool_choice", "function_call"}) {
    const Json* const value = reader.Find(field);
    if (value != nullptr && *value != "none" && *value != "auto") {
      reader.Fail(field, "is not supported: only `none` and `auto` are accepted");
    }
  }
}

void RefuseFormats(FieldReader& reader) {
  if (const Json* const format = reader.Find("response_format")) {
    const bool text =
        format->is_object() && format->contains("type") && (*format)["type"] == "text";
    if (!text) reader.Fail("response_format", "is not supported: only type `text` is accepted");
  }
  if (const Json* const modalities = reader.Find("modalities")) {
    if (*modalities != Json::array({"text"})) {
      reader.Fail("modalities", "is not supported: only [\"text\"] is accepted");
    }
  }
  bool continue_final_message = false;
  reader.Boolean("continue_final_message", &continue_final_message);
  if (continue_final_message) reader.Fail("continue_final_message", "is not supported");
}

void ReadStop(FieldReader& reader, std::vector<std::string>* stop) {
  const Json* const value = reader.Find("stop");
  if (value == nullptr) return;
  if (value->is_string()) {
    stop->push_back(value->get<std::string>());
    return;
  }
  if (!value->is_array()) return reader.Fail("stop", "must be a string or an array of strings");
  for (const Json& element : *value) {
    if (!element.is_string()) return reader.Fail("stop", "must hold strings only");
    stop->push_back(element.get<std::string>());
  }
}

void ReadLogitBias(FieldReader& reader, GenerationFields* fields) {
  const Json* const value = reader.Find("logit_bias");
  if (value == nullptr) return;
  if (!value->is_object()) return reader.Fail("logit_bias", "must map token ids to numbers");
  for (const auto& [key, bias] : value->items()) {
    int64_t id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size()) {
      return reader.Fail("logit_bias", "must have token ids as keys");
    }
    if (!bias.is_number()) return reader.Fail("logit_bias", "must have numbers as values");
    fields->logit_bias.emplace_back(id, bias.get<double>());
  }
}

void ReadLimits(FieldReader& reader, GenerationFields* fields) {
  reader.Integer("max_tokens", &fields->max_tokens);
  std::optional<int64_t> newer;
  reader.Integer("max_completion_tokens", &newer);
  if (newer) {
    fields->max_tokens = newer;
    fields->max_tokens_name = "max_completion_tokens";
  }
  reader.Integer("min_tokens", &fields->min_tokens);
  reader.Boolean("ignore_eos", &fields->ignore_eos);
  reader.TokenIds("stop_token_ids", &fields->stop_token_ids);
  ReadStop(reader, &fields->stop);
}

void ReadSampling(FieldReader& reader, GenerationFields* fields) {
  reader.Number("temperature", &fields->temperature);
  reader.Integer("top_k", &fields->top_k);
  reader.Number("top_p", &fields->top_p);
  reader.Number("min_p", &fields->min_p);
  reader.Number("presence_penalty", &fields->presence_penalty);
  reader.Number("frequency_penalty", &fields->frequency_penalty);
  reader.Number("repetition_penalty", &fields->repetition_penalty);
  reader.Integer("seed", &fields->seed);
  reader.Integer("n", &fields->n);
  ReadLogitBias(reader, fields);
}

void ReadStreaming(FieldReader& reader, OpenAiRequest* request) {
  reader.Boolean("stream", &request->stream);
  const Json* const options = reader.Find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) return reader.Fail("stream_options", "must be an object");
  FieldReader option_reader(*options, "stream_options.");
  option_reader.Boolean("include_usage", &request->include_usage);
  reader.Fail(option_reader.status());
}

// What chat and text completions have in common.
void ReadCommon(FieldReader& reader, OpenAiRequest* request) {
  std::optional<std::string> model;
  reader.Text("model", &model);
  request->model = model.value_or("");
  RefuseUnserved(reader);
  RefuseTools(reader);
  RefuseFormats(reader);
  ReadSampling(reader, &request->fields);
  ReadLimits(reader, &request->fields);
  ReadStreaming(reader, request);
  reader.Boolean("skip_special_tokens", &request->fields.skip_special_tokens);
  reader.Boolean("return_token_ids", &request->return_token_ids);
  reader.Boolean("return_tokens_as_token_ids", &request->tokens_as_token_ids);
}

// The chat prompt of a body with "messages".
absl::StatusOr<ChatPrompt> ReadChatPrompt(FieldReader& reader) {
  ChatPrompt prompt;
  const Json* const messages = reader.Find("messages");
  if (messages == nullptr) return FieldError("messages", "messages is required");
  ASSIGN_OR_RETURN(prompt.messages_json, NormalizeMessages(*messages, "messages"));
  reader.Boolean("add_generation_prompt", &prompt.add_generation_prompt);
  if (const Json* const kwargs = reader.Find("chat_template_kwargs")) {
    if (!kwargs->is_object()) reader.Fail("chat_template_kwargs", "must be an object");
    prompt.kwargs_json = kwargs->dump();
  }
  RETURN_IF_ERROR(reader.status());
  return prompt;
}

void ReadChatLogprobs(FieldReader& reader, GenerationFields* fields) {
  bool logprobs = false;
  reader.Boolean("logprobs", &logprobs);
  std::optional<int64_t> top;
  reader.Integer("top_logprobs", &top);
  if (logprobs) {
    fields->top_logprobs = top.value_or(0);
  } else if (top.value_or(0) != 0) {
    reader.Fail("top_logprobs", "needs logprobs to be true");
  }
}

absl::Status ReadPrompts(const Json& value, bool add_special_tokens, OpenAiRequest* request) {
  constexpr char kShape[] =
      "prompt must be a string, an array of strings, an array of token ids or an array of such";
  const auto text_prompt = [&](const Json& text) {
    return TextPrompt{text.get<std::string>(), add_special_tokens};
  };
  if (value.is_string()) {
    request->prompts.emplace_back(text_prompt(value));
    return absl::OkStatus();
  }
  if (!value.is_array()) return FieldError("prompt", kShape);
  if (value.empty()) return FieldError("prompt", "The prompt is empty.");
  if (value[0].is_number()) {
    std::vector<uint32_t> ids;
    RETURN_IF_ERROR(ReadTokenIds(value, "prompt", &ids));
    request->prompts.emplace_back(std::move(ids));
    return absl::OkStatus();
  }
  request->prompts_are_list = true;
  for (size_t i = 0; i < value.size(); ++i) {
    const Json& element = value[i];
    if (element.is_string()) {
      request->prompts.emplace_back(text_prompt(element));
    } else if (element.is_array()) {
      std::vector<uint32_t> ids;
      RETURN_IF_ERROR(ReadTokenIds(element, absl::StrCat("prompt[", i, "]"), &ids));
      request->prompts.emplace_back(std::move(ids));
    } else {
      return FieldError("prompt", kShape);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OpenAiRequest> ParseChatRequest(const Json& body) {
  FieldReader reader(body);
  OpenAiRequest request;
  request.chat = true;
  request.fields.prompt_name = "messages";
  ReadCommon(reader, &request);
  ReadChatLogprobs(reader, &request.fields);
  RETURN_IF_ERROR(reader.status());
  if (request.fields.max_tokens == 0) {
    return FieldError(request.fields.max_tokens_name,
                      request.fields.max_tokens_name + " must be at least 1");
  }
  ASSIGN_OR_RETURN(ChatPrompt prompt, ReadChatPrompt(reader));
  request.prompts.emplace_back(std::move(prompt));
  return request;
}

absl::StatusOr<OpenAiRequest> ParseCompletionRequest(const Json& body) {
  FieldReader reader(body);
  OpenAiRequest request;
  ReadCommon(reader, &request);
  reader.Boolean("echo", &request.echo);
  reader.Integer("logprobs", &request.fields.top_logprobs);
  request.fields.top_logprobs_name = "logprobs";
  request.fields.prompt_logprobs = request.echo && request.fields.top_logprobs.has_value();
  bool add_special_tokens = true;
  reader.Boolean("add_special_tokens", &add_special_tokens);
  RETURN_IF_ERROR(reader.status());
  const Json* const prompt = reader.Find("prompt");
  if (prompt == nullptr) return FieldError("prompt", "prompt is required");
  RETURN_IF_ERROR(ReadPrompts(*prompt, add_special_tokens, &request));
  return request;
}

absl::StatusOr<TokenizeBody> ParseTokenizeRequest(const Json& body) {
  FieldReader reader(body);
  TokenizeBody request;
  std::optional<std::string> model, text;
  reader.Text("model", &model);
  reader.Text("prompt", &text);
  reader.Boolean("return_token_strs", &request.return_token_strings);
  bool add_special_tokens = true;
  reader.Boolean("add_special_tokens", &add_special_tokens);
  RETURN_IF_ERROR(reader.status());
  request.model = model.value_or("");
  if (text) {
    request.prompt_name = "prompt";
    request.prompt = TextPrompt{*std::move(text), add_special_tokens};
    return request;
  }
  if (!reader.Has("messages")) return FieldError("prompt", "prompt or messages is required");
  RefuseTools(reader);
  request.prompt_name = "messages";
  ASSIGN_OR_RETURN(request.prompt, ReadChatPrompt(reader));
  return request;
}

absl::StatusOr<DetokenizeBody> ParseDetokenizeRequest(const Json& body) {
  FieldReader reader(body);
  DetokenizeBody request;
  std::optional<std::string> model;
  reader.Text("model", &model);
  reader.TokenIds("tokens", &request.ids);
  reader.Boolean("skip_special_tokens", &request.skip_special_tokens);
  RETURN_IF_ERROR(reader.status());
  request.model = model.value_or("");
  if (!reader.Has("tokens")) return FieldError("tokens", "tokens is required");
  return request;
}

}  // namespace tandem::gateway
