#pragma once

// What the gateway reads from a model directory or GGUF file: tokenizer, chat template, default
// sampling values and stop tokens; never weights. All may be absent but the config: without a
// usable tokenizer the model is served with token ids in and out.
//
// Immutable once loaded; its members may be shared between threads.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/api/request_builder.h"
#include "gateway/text/chat_template.h"
#include "gateway/text/tokenizer.h"

namespace tandem::gateway {

struct ModelDirectory {
  std::unique_ptr<Tokenizer> tokenizer;         // null: none, or of a kind that is not supported
  std::unique_ptr<ChatTemplate> chat_template;  // null: none
  GenerationDefaults defaults;
  // The union of config.json's, generation_config.json's and the tokenizer's.
  std::vector<uint32_t> end_ids;
};

// Errors name the file and the key: a broken config.json, generation_config.json, tokenizer.json or
// chat template is refused; kinds of tokenizer that are not supported are logged.
absl::StatusOr<ModelDirectory> LoadModelDirectory(const std::string& path);

}  // namespace tandem::gateway
