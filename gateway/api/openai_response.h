#pragma once

// Turns the engine's events into the OpenAI dialect's responses: one JSON body, or chunks of an SSE
// stream. One object serves one request: chunks are made with Chunks(event), the whole body with
// Collect(event) for every event and then Body().
//
// Token spellings in logprobs: the token's text; "bytes:\xNN..." where it is not valid UTF-8 by
// itself; "token_id:N" where the model has no tokenizer or the request asks for it.
//
// Thread safety: one owner. The tokenizer (may be null) must outlive it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gateway/api/json_writer.h"
#include "gateway/api/openai_request.h"
#include "gateway/engine.h"
#include "gateway/text/tokenizer.h"

namespace tandem::gateway {

struct ResponseShape {
  bool chat = false;
  bool include_usage = false;
  bool echo = false;
  bool logprobs = false;
  bool token_ids = false;
  bool tokens_as_token_ids = false;
  bool discard_output = false;  // only the prompt is reported
  size_t choices_per_prompt = 1;
  std::string id;
  std::string model;
  int64_t created_unix_s = 0;
};

// What echo and token ids of a prompt report.
struct PromptEcho {
  std::string text;
  std::vector<uint32_t> token_ids;
};

class OpenAiResponse {
 public:
  OpenAiResponse(ResponseShape shape, std::vector<PromptEcho> prompts, const Tokenizer* tokenizer);

  // SSE events ("data: ...\n\n" each) for one event of a choice; may be empty.
  std::string Chunks(size_t choice, const GenerationEvent& event);
  // The chunk with usage and no choices.
  std::string UsageChunk();

  void Collect(size_t choice, const GenerationEvent& event);
  std::string Body();

  uint32_t prompt_tokens() const;
  uint32_t completion_tokens() const;

 private:
  struct Choice {
    bool started = false;
    std::string text;
    std::vector<uint32_t> token_ids;
    std::vector<TokenLogprob> logprobs;
    std::vector<TokenLogprob> prompt_logprobs;
    bool first_prompt_token_reported = false;
    size_t text_offset = 0;  // code points before the next token of logprobs
    FinishReason reason = FinishReason::kNone;
    std::string matched_stop;
    std::optional<uint32_t> matched_stop_token;
    uint32_t prompt_tokens = 0;
    uint32_t completion_tokens = 0;
    uint32_t cached_tokens = 0;
  };

  void Count(Choice& choice, const GenerationEvent& event);
  const PromptEcho& PromptOf(size_t choice) const;
  void BeginObject(JsonWriter& json, std::string_view object) const;
  void BeginChunk(JsonWriter& json, size_t choice) const;
  std::string EndChunk(JsonWriter& json) const;
  std::string RoleChunk(size_t choice) const;
  std::string DeltaChunk(size_t choice, const GenerationEvent& event, std::string_view prefix);
  std::string FinishChunk(size_t choice) const;
  void WriteFinish(JsonWriter& json, const Choice& choice) const;
  void WriteUsage(JsonWriter& json) const;
  void WriteTokenIds(JsonWriter& json, const std::vector<uint32_t>& ids) const;
  void WriteBodyChoice(JsonWriter& json, size_t index);
  void WriteLogprobs(JsonWriter& json, size_t choice, const std::vector<TokenLogprob>& prompt,
                     const std::vector<TokenLogprob>& generated);
  void WriteChatLogprobs(JsonWriter& json, const std::vector<TokenLogprob>& logprobs) const;
  void WriteTextLogprobs(JsonWriter& json, size_t choice,
                         const std::vector<TokenLogprob>& logprobs);
  std::string TokenText(uint32_t id) const;
  void WriteTokenBytes(JsonWriter& json, uint32_t id) const;

  const ResponseShape shape_;
  const std::vector<PromptEcho> prompts_;
  const Tokenizer* const tokenizer_;
  std::vector<Choice> choices_;
};

}  // namespace tandem::gateway
