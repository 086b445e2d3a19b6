// The two shapes of log-probabilities in the OpenAI dialect: a list of objects for chat, parallel
// arrays for text completions.

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "gateway/api/openai_response.h"
#include "gateway/text/detokenizer.h"

namespace tandem::gateway {
namespace {

// Whether `bytes` is UTF-8 text by itself.
bool IsText(std::string_view bytes) {
  std::string valid;
  Utf8Stream stream;
  stream.Append(bytes, &valid);
  stream.Flush(&valid);
  return valid == bytes;
}

size_t CodePoints(std::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) >> 6) != 2; }));
}

}  // namespace

std::string OpenAiResponse::TokenText(uint32_t id) const {
  const std::string_view bytes =
      tokenizer_ == nullptr ? std::string_view() : tokenizer_->TokenBytes(id);
  if (shape_.tokens_as_token_ids || bytes.empty()) return absl::StrCat("token_id:", id);
  if (IsText(bytes)) return std::string(bytes);
  std::string escaped = "bytes:";
  for (const char c : bytes) {
    absl::StrAppend(&escaped, "\\x", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
  }
  return escaped;
}

void OpenAiResponse::WriteTokenBytes(JsonWriter& json, uint32_t id) const {
  json.Key("bytes");
  if (tokenizer_ == nullptr) {
    json.Null();
    return;
  }
  json.BeginArray();
  for (const char c : tokenizer_->TokenBytes(id)) json.Uint(static_cast<unsigned char>(c));
  json.EndArray();
}

void OpenAiResponse::WriteChatLogprobs(JsonWriter& json,
                                       const std::vector<TokenLogprob>& logprobs) const {
  const auto write_token = [&](uint32_t id, float logprob) {
    json.Key("token").String(TokenText(id)).Key("logprob").Float(logprob);
    WriteTokenBytes(json, id);
  };
  json.BeginObject().Key("content").BeginArray();
  for (const TokenLogprob& entry : logprobs) {
    json.BeginObject();
    write_token(entry.token_id, entry.logprob);
    json.Key("top_logprobs").BeginArray();
    for (const TopLogprob& top : entry.top) {
      json.BeginObject();
      write_token(top.token_id, top.logprob);
      json.EndObject();
    }
    json.EndArray().EndObject();
  }
  json.EndArray().EndObject();
}

void OpenAiResponse::WriteTextLogprobs(JsonWriter& json, size_t index,
                                       const std::vector<TokenLogprob>& logprobs) {
  Choice& choice = choices_[index];
  // The prompt's first token has no logprob: nothing comes before it.
  const std::vector<uint32_t>& prompt = PromptOf(index).token_ids;
  const bool lead = shape_.echo && !choice.first_prompt_token_reported && !prompt.empty();
  choice.first_prompt_token_reported = true;
  std::vector<std::string> texts;
  if (lead) texts.push_back(TokenText(prompt.front()));
  for (const TokenLogprob& entry : logprobs) texts.push_back(TokenText(entry.token_id));

  json.BeginObject().Key("tokens").BeginArray();
  for (const std::string& text : texts) json.String(text);
  json.EndArray().Key("token_logprobs").BeginArray();
  if (lead) json.Null();
  for (const TokenLogprob& entry : logprobs) json.Float(entry.logprob);
  json.EndArray().Key("top_logprobs").BeginArray();
  if (lead) json.Null();
  for (const TokenLogprob& entry : logprobs) {
    // The token itself is always there, beside the likeliest ones.
    std::set<std::string> seen;
    json.BeginObject();
    const auto write = [&](uint32_t id, float logprob) {
      const std::string text = TokenText(id);
      if (seen.insert(text).second) json.Key(text).Float(logprob);
    };
    for (const TopLogprob& top : entry.top) write(top.token_id, top.logprob);
    write(entry.token_id, entry.logprob);
    json.EndObject();
  }
  json.EndArray().Key("text_offset").BeginArray();
  for (const std::string& text : texts) {
    json.Uint(choice.text_offset);
    choice.text_offset += CodePoints(text);
  }
  json.EndArray().EndObject();
}

void OpenAiResponse::WriteLogprobs(JsonWriter& json, size_t choice,
                                   const std::vector<TokenLogprob>& prompt,
                                   const std::vector<TokenLogprob>& generated) {
  if (!shape_.logprobs) {
    json.Null();
  } else if (shape_.chat) {
    WriteChatLogprobs(json, generated);
  } else {
    std::vector<TokenLogprob> all = prompt;
    all.insert(all.end(), generated.begin(), generated.end());
    WriteTextLogprobs(json, choice, all);
  }
}

}  // namespace tandem::gateway
