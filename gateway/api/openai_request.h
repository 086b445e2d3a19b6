#pragma once

// The OpenAI dialect's request bodies, parsed and checked as far as that needs no model: shapes,
// types, fields that are refused by name. What is left (ranges, tokens, context) is
// request_builder.h's.
//
// JSON null counts as an absent field and unknown fields are ignored, but a field that would change
// the answer and is not served (tools, response_format, images ...) is refused: INVALID_ARGUMENT
// with the field as param. Free functions without state: thread-safe.

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/api/request_builder.h"
#include "gateway/api/request_json.h"

namespace tandem::gateway {

struct OpenAiRequest {
  bool chat = false;
  std::string model;            // empty: whichever is served
  std::vector<Prompt> prompts;  // one for chat
  bool prompts_are_list = false;
  GenerationFields fields;

  bool stream = false;
  bool include_usage = false;
  bool echo = false;                 // completions: the prompt comes first in the text
  bool return_token_ids = false;     // extension: token ids beside the text
  bool tokens_as_token_ids = false;  // extension: logprobs spell tokens "token_id:N"
};

absl::StatusOr<OpenAiRequest> ParseChatRequest(const Json& body);
absl::StatusOr<OpenAiRequest> ParseCompletionRequest(const Json& body);

// Body of /tokenize: a text or messages.
struct TokenizeBody {
  std::string model;
  Prompt prompt;
  std::string prompt_name;
  bool return_token_strings = false;
};
absl::StatusOr<TokenizeBody> ParseTokenizeRequest(const Json& body);

// Body of /detokenize.
struct DetokenizeBody {
  std::string model;
  std::vector<uint32_t> ids;
  bool skip_special_tokens = false;
};
absl::StatusOr<DetokenizeBody> ParseDetokenizeRequest(const Json& body);

// Checks an array of OpenAI messages and returns it as chat templates expect it: text parts joined
// to one text, "developer" as "system". `param` names it in errors.
absl::StatusOr<std::string> NormalizeMessages(const Json& messages, std::string_view param);

}  // namespace tandem::gateway
