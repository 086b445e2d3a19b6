// Feeds the tokenizer's loader and encoder. The first byte chooses: 0 takes the rest as a whole
// tokenizer.json; otherwise the rest is lines that take the place of parts of a small valid file
// (normalizer, pre_tokenizer, post_processor, added_tokens, merges) and, as the last, the text, so
// that mutations reach what lies behind the loader. The byte's value sets where the text may not
// match.
//
// Run: tokenizer_json_fuzz -runs=100000 -max_len=4096 <scratch corpus> seeds/tokenizer_json_fuzz

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/check.h"
#include "gateway/text/detokenizer.h"
#include "gateway/text/tokenizer.h"

namespace {

using tandem::gateway::Detokenizer;
using tandem::gateway::PromptText;
using tandem::gateway::TokenId;
using tandem::gateway::Tokenizer;

std::string ByteSpelling(int byte, int* spare) {
  const bool printable =
      (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE);
  const int code = printable ? byte : (*spare)++;
  if (code == '"' || code == '\\') return std::string("\\") + static_cast<char>(code);
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

// {"!": 33, ...}: all bytes and four pairs.
const std::string& Vocabulary() {
  static const std::string& vocab = *new std::string([] {
    std::string out = "{";
    int spare = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      out += "\"" + ByteSpelling(byte, &spare) + "\":" + std::to_string(byte) + ",";
    }
    return out + R"("ab":256,"abc":257,"aa":258,"aaaa":259})";
  }());
  return vocab;
}

void Check(const Tokenizer& tokenizer, const PromptText& prompt) {
  const auto ids = tokenizer.Encode(prompt, {.add_special_tokens = true});
  if (!ids.ok()) {
    TANDEM_CHECK(!ids.status().message().empty());
    return;
  }
  std::string streamed;
  Detokenizer detokenizer(&tokenizer, {});
  for (const TokenId id : *ids) {
    TANDEM_CHECK(id < tokenizer.vocab_size());
    detokenizer.Append(id, &streamed);
  }
  detokenizer.Flush(&streamed);
  TANDEM_CHECK(streamed == tokenizer.Decode(*ids, {}));
  const auto plain = tokenizer.Encode(prompt.text, {.parse_special = false});
  if (plain.ok()) tokenizer.Decode(*plain, {.skip_special = true});
}

std::string_view NextLine(std::string_view* rest) {
  const size_t end = rest->find('\n');
  const std::string_view line = rest->substr(0, end);
  *rest = end == std::string_view::npos ? std::string_view() : rest->substr(end + 1);
  return line;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::string json(rest);
  std::string_view text = "ab<x> aaaa 12\n";
  if (data[0] != 0) {
    json = "{\"decoder\":{\"type\":\"ByteLevel\"}";
    for (const char* key : {"normalizer", "pre_tokenizer", "post_processor", "added_tokens"}) {
      json += std::string(",\"") + key + "\":" + std::string(NextLine(&rest));
    }
    json += ",\"model\":{\"merges\":" + std::string(NextLine(&rest)) +
            ",\"vocab\":" + Vocabulary() + "}}";
    text = rest;
  }
  const auto tokenizer = Tokenizer::FromJson(json, "fuzz");
  if (!tokenizer.ok()) {
    TANDEM_CHECK(!tokenizer.status().message().empty());
    return 0;
  }
  PromptText prompt{std::string(text), {}};
  // Breaks lie between characters.
  for (size_t at = data[0]; at != 0 && at < text.size(); at += data[0]) {
    if ((text[at] & 0xC0) != 0x80) prompt.breaks.push_back(at);
  }
  Check(**tokenizer, prompt);
  return 0;
}
