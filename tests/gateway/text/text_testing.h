#pragma once

// Shared by the tests of gateway/text: reference tokenizers, golden files, and small tokenizers
// built in the test itself.

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gateway/text/chat_template.h"
#include "gateway/text/tokenizer.h"

namespace tandem::gateway::testing {

// The JSON of a file of the shared data; empty where it is absent.
std::optional<nlohmann::ordered_json> SharedJson(std::string_view relative);

// A tokenizer of the shared data ("data/tokenizers/qwen3", "models/tandem-tiny"), loaded once; null
// where it is absent. Fails the test if it is there and does not load.
const Tokenizer* SharedTokenizer(const std::string& relative);

// A tokenizer.json with the 256 bytes (ids 0-255) and these merges (ids from 256 on, spelled in the
// byte alphabet), split by `pre_tokenizer`.
nlohmann::ordered_json SmallTokenizerJson(
    const std::vector<std::pair<std::string, std::string>>& merges);

// Limits that a busy test machine does not reach.
ChatTemplateOptions PatientOptions();

// The printable character that stands for a byte in vocabularies.
std::string ByteSpelling(int byte);

}  // namespace tandem::gateway::testing
