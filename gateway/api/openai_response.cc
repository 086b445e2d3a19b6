#include "gateway/api/openai_response.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {
namespace {

std::string Sse(std::string json) { return absl::StrCat("data: ", json, "\n\n"); }

const char* FinishName(FinishReason reason) {
  return reason == FinishReason::kStop ? "stop" : "length";
}

template <typename T>
void Append(const std::vector<T>& from, std::vector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

}  // namespace

OpenAiResponse::OpenAiResponse(ResponseShape shape, std::vector<PromptEcho> prompts,
                               const Tokenizer* tokenizer)
    : shape_(std::move(shape)),
      prompts_(std::move(prompts)),
      tokenizer_(tokenizer),
      choices_(prompts_.size() * shape_.choices_per_prompt) {}

const PromptEcho& OpenAiResponse::PromptOf(size_t choice) const {
  return prompts_[choice / shape_.choices_per_prompt];
}

void OpenAiResponse::Count(Choice& choice, const GenerationEvent& event) {
  choice.prompt_tokens = event.prompt_tokens;
  choice.completion_tokens = shape_.discard_output ? 0 : event.completion_tokens;
  choice.cached_tokens = event.cached_tokens;
  if (!event.finished) return;
  choice.reason = shape_.discard_output ? FinishReason::kLength : event.reason;
  choice.matched_stop = event.matched_stop;
  choice.matched_stop_token = event.matched_stop_token;
}

// The prompt's tokens count once, however many choices continue it.
uint32_t OpenAiResponse::prompt_tokens() const {
  uint32_t total = 0;
  for (const PromptEcho& prompt : prompts_) total += static_cast<uint32_t>(prompt.token_ids.size());
  return total;
}

uint32_t OpenAiResponse::completion_tokens() const {
  uint32_t total = 0;
  for (const Choice& choice : choices_) total += choice.completion_tokens;
  return total;
}

void OpenAiResponse::WriteUsage(JsonWriter& json) const {
  uint32_t cached = 0;
  for (size_t i = 0; i < choices_.size(); i += shape_.choices_per_prompt) {
    cached += choices_[i].cached_tokens;
  }
  json.Key("usage").BeginObject();
  json.Key("prompt_tokens").Uint(prompt_tokens());
  json.Key("completion_tokens").Uint(completion_tokens());
  json.Key("total_tokens").Uint(uint64_t{prompt_tokens()} + completion_tokens());
  json.Key("prompt_tokens_details").BeginObject();
  json.Key("cached_tokens").Uint(cached).EndObject();
  json.EndObject();
}

void OpenAiResponse::WriteTokenIds(JsonWriter& json, const std::vector<uint32_t>& ids) const {
  json.BeginArray();
  for (const uint32_t id : ids) json.Uint(id);
  json.EndArray();
}

void OpenAiResponse::BeginObject(JsonWriter& json, std::string_view object) const {
  json.BeginObject();
  json.Key("id").String(shape_.id);
  json.Key("object").String(object);
  json.Key("created").Int(shape_.created_unix_s);
  json.Key("model").String(shape_.model);
}

void OpenAiResponse::WriteFinish(JsonWriter& json, const Choice& choice) const {
  json.Key("finish_reason").String(FinishName(choice.reason));
  json.Key("stop_reason");
  if (!choice.matched_stop.empty()) {
    json.String(choice.matched_stop);
  } else if (choice.matched_stop_token) {
    json.Uint(*choice.matched_stop_token);
  } else {
    json.Null();
  }
}

void OpenAiResponse::BeginChunk(JsonWriter& json, size_t choice) const {
  BeginObject(json, shape_.chat ? "chat.completion.chunk" : "text_completion");
  json.Key("choices").BeginArray().BeginObject().Key("index").Uint(choice);
}

std::string OpenAiResponse::EndChunk(JsonWriter& json) const {
  json.EndObject().EndArray();
  if (shape_.include_usage) json.Key("usage").Null();
  json.EndObject();
  return Sse(json.Take());
}

std::string OpenAiResponse::RoleChunk(size_t choice) const {
  JsonWriter json;
  BeginChunk(json, choice);
  json.Key("delta").BeginObject();
  json.Key("role").String("assistant").Key("content").String("").EndObject();
  json.Key("logprobs").Null().Key("finish_reason").Null();
  if (shape_.token_ids) {
    json.Key("prompt_token_ids");
    WriteTokenIds(json, PromptOf(choice).token_ids);
  }
  return EndChunk(json);
}

std::string OpenAiResponse::DeltaChunk(size_t choice, const GenerationEvent& event,
                                       std::string_view prefix) {
  static const std::vector<TokenLogprob> kNone;
  const std::string text =
      shape_.discard_output ? std::string(prefix) : absl::StrCat(std::string(prefix), event.text);
  const std::vector<TokenLogprob>& logprobs = shape_.discard_output ? kNone : event.logprobs;
  JsonWriter json;
  BeginChunk(json, choice);
  if (shape_.chat) {
    json.Key("delta").BeginObject().Key("content").String(text).EndObject();
  } else {
    json.Key("text").String(text);
  }
  json.Key("logprobs");
  WriteLogprobs(json, choice, event.prompt_logprobs, logprobs);
  json.Key("finish_reason").Null();
  if (shape_.token_ids && !shape_.discard_output) {
    json.Key("token_ids");
    WriteTokenIds(json, event.token_ids);
  }
  return EndChunk(json);
}

std::string OpenAiResponse::FinishChunk(size_t choice) const {
  JsonWriter json;
  BeginChunk(json, choice);
  if (shape_.chat) {
    json.Key("delta").BeginObject().EndObject();
  } else {
    json.Key("text").String("");
  }
  json.Key("logprobs").Null();
  WriteFinish(json, choices_[choice]);
  return EndChunk(json);
}

std::string OpenAiResponse::Chunks(size_t index, const GenerationEvent& event) {
  Choice& choice = choices_[index];
  Count(choice, event);
  std::string out;
  std::string prefix;
  if (!choice.started) {
    choice.started = true;
    if (shape_.chat) out += RoleChunk(index);
    if (shape_.echo) prefix = PromptOf(index).text;
  }
  const bool generated = !shape_.discard_output &&
                         (!event.text.empty() || (shape_.logprobs && !event.logprobs.empty()) ||
                          (shape_.token_ids && !event.token_ids.empty()));
  if (generated || !prefix.empty() || !event.prompt_logprobs.empty()) {
    out += DeltaChunk(index, event, prefix);
  }
  if (event.finished) out += FinishChunk(index);
  return out;
}

std::string OpenAiResponse::UsageChunk() {
  JsonWriter json;
  BeginObject(json, shape_.chat ? "chat.completion.chunk" : "text_completion");
  json.Key("choices").BeginArray().EndArray();
  WriteUsage(json);
  json.EndObject();
  return Sse(json.Take());
}

void OpenAiResponse::Collect(size_t index, const GenerationEvent& event) {
  Choice& choice = choices_[index];
  Count(choice, event);
  Append(event.prompt_logprobs, &choice.prompt_logprobs);
  if (shape_.discard_output) return;
  choice.text += event.text;
  Append(event.token_ids, &choice.token_ids);
  Append(event.logprobs, &choice.logprobs);
}

void OpenAiResponse::WriteBodyChoice(JsonWriter& json, size_t index) {
  const Choice& choice = choices_[index];
  const PromptEcho& prompt = PromptOf(index);
  json.BeginObject().Key("index").Uint(index);
  if (shape_.chat) {
    json.Key("message").BeginObject();
    json.Key("role").String("assistant").Key("content").String(choice.text).EndObject();
  } else {
    json.Key("text").String(shape_.echo ? prompt.text + choice.text : choice.text);
  }
  json.Key("logprobs");
  WriteLogprobs(json, index, choice.prompt_logprobs, choice.logprobs);
  WriteFinish(json, choice);
  if (shape_.token_ids) {
    json.Key("token_ids");
    WriteTokenIds(json, choice.token_ids);
    json.Key("prompt_token_ids");
    WriteTokenIds(json, prompt.token_ids);
  }
  json.EndObject();
}

std::string OpenAiResponse::Body() {
  JsonWriter json;
  BeginObject(json, shape_.chat ? "chat.completion" : "text_completion");
  json.Key("choices").BeginArray();
  for (size_t i = 0; i < choices_.size(); ++i) WriteBodyChoice(json, i);
  json.EndArray();
  WriteUsage(json);
  json.EndObject();
  return json.Take();
}

}  // namespace tandem::gateway
