#pragma once

// The contents of a tokenizer.json (or of a GGUF file: gateway/gguf_tokenizer.h) as checked plain
// data. Everything the format can say that the classes built from it (Normalizer, PreTokenizer,
// BpeModel, AddedTokenMatcher) cannot do is refused here, naming source and key.
//
// String views point into the parsed document, which the spec keeps alive.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/text/tokenizer.h"

namespace tandem::gateway {

// Ids are indices of arrays; the largest vocabularies in use have about 2^18 entries.
inline constexpr uint32_t kMaxTokenId = 1u << 21;
inline constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;
inline constexpr size_t kMaxAddedTokens = 1u << 16;
inline constexpr size_t kMaxAddedTokenBytes = 1024;
inline constexpr size_t kMaxPatternBytes = 16384;
inline constexpr size_t kMaxSteps = 32;

enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };

// What becomes of the parts of a text that match a pattern.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct PreTokenizerStep {
  enum class Kind { kPattern, kPrefixSpace };
  Kind kind = Kind::kPattern;
  std::string pattern;  // Oniguruma syntax unless `literal`
  bool literal = false;
  bool invert = false;
  SplitBehavior behavior = SplitBehavior::kIsolated;
};

struct BpeSpec {
  std::vector<std::pair<std::string_view, TokenId>> vocab;  // byte-level spelling, id
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  bool ignore_merges = false;  // a word that is a vocabulary entry is that token
  // Bytes that have no token are left out of a text; else a vocabulary without one is refused.
  bool skips_unknown_bytes = false;
};

struct TokenizerSpec {
  std::vector<UnicodeForm> normalizers;
  std::vector<PreTokenizerStep> pre_tokenizers;
  BpeSpec model;
  std::vector<AddedToken> added_tokens;
  // What add_special_tokens puts around a text.
  std::vector<TokenId> prefix_ids;
  std::vector<TokenId> suffix_ids;
  std::shared_ptr<const void> document;
};

// What a bare {"type": "ByteLevel"} splits by: the pattern of GPT-2's published encoder.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// "left right": two parts with one blank between; nullopt: it is not that.
std::optional<std::pair<std::string_view, std::string_view>> SplitMerge(std::string_view text);

absl::StatusOr<TokenizerSpec> ParseTokenizerSpec(std::string_view json, std::string_view source);

}  // namespace tandem::gateway
