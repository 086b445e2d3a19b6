#pragma once

// Text <-> token ids for byte-level BPE models described by a tokenizer.json or a GGUF file.
//
//   ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::Load(model_dir));
//   ASSIGN_OR_RETURN(auto ids, tokenizer->Encode("Hello", {.add_special_tokens = true}));
//   std::string text = tokenizer->Decode(ids, {});
//
// The result equals the Hugging Face tokenizers library's for everything that loads; what is not
// supported (another model type, normalizer, pre-tokenizer, decoder or pattern syntax) is refused
// at load with a status that names the file and the key. Files and texts are untrusted: sizes are
// bounded, encoding takes O(n log n), and a pattern that backtracks without end fails the call.
//
// Thread safety: immutable after load; all const methods may run concurrently.
// Errors: NOT_FOUND when the directory has no tokenizer.json, INVALID_ARGUMENT for a file that is
// broken, UNIMPLEMENTED for a feature that is not supported; Encode: INVALID_ARGUMENT for text that
// is not UTF-8 or exceeds a limit.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/text/prompt_text.h"
#include "gateway/text/tokenizer_config.h"

namespace tandem::gateway {

using TokenId = uint32_t;

struct EncodeOptions {
  // Adds what the model expects around a raw prompt (BOS and the like). False for rendered chat
  // prompts: there the template writes them itself.
  bool add_special_tokens = false;
  // Whether an added token (control tokens, but also e.g. <think>) spelled in the text becomes that
  // token. False: all of the text is ordinary text.
  bool parse_special = true;
};

struct DecodeOptions {
  bool skip_special = false;  // leave out tokens whose "special" flag is set
};

struct TokenizerSpec;

// A token outside the BPE merges: `content` is its spelling.
struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = false;
  bool single_word = false;  // only between non-word characters
  bool lstrip = false;       // takes blanks before it along
  bool rstrip = false;       // takes blanks after it along
  bool normalized = false;   // is looked for in the normalized text
};

class Tokenizer {
 public:
  // Reads tokenizer.json and what LoadTokenizerConfig reads.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::filesystem::path& model_dir);
  // `source` names the text in errors.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(std::string_view tokenizer_json,
                                                             std::string_view source,
                                                             TokenizerConfig config = {});
  // The same from parsed data, which need not outlive the call.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromSpec(TokenizerSpec spec,
                                                             std::string_view source,
                                                             TokenizerConfig config = {});
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, EncodeOptions options) const;
  // As above, for a rendered chat prompt: added tokens never match across prompt.breaks.
  absl::StatusOr<std::vector<TokenId>> Encode(const PromptText& prompt,
                                              EncodeOptions options) const;

  // The text of all ids together, invalid UTF-8 replaced (one U+FFFD per maximal invalid subpart).
  // Unknown ids give nothing. For streams use Detokenizer (detokenizer.h).
  std::string Decode(std::span<const TokenId> ids, DecodeOptions options) const;

  // The raw bytes a token stands for (possibly a part of a character); empty for an unknown id.
  // Valid as long as the tokenizer.
  std::string_view TokenBytes(TokenId id) const;
  // True for added tokens with "special": true.
  bool IsSpecial(TokenId id) const;
  // The token spelled exactly so: an added token, else a vocabulary entry (in the file's byte-level
  // spelling).
  std::optional<TokenId> TokenToId(std::string_view spelling) const;

  // Highest id + 1. The model's own vocabulary may be larger (padded).
  uint32_t vocab_size() const;
  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> eos_id() const;
  const std::vector<AddedToken>& added_tokens() const;
  const TokenizerConfig& config() const;

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<const State> state);

  absl::StatusOr<std::vector<TokenId>> EncodeImpl(std::string_view text,
                                                  std::span<const size_t> breaks,
                                                  EncodeOptions options) const;

  std::unique_ptr<const State> state_;
};

}  // namespace tandem::gateway
