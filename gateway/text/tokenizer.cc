#include "gateway/text/tokenizer.h"

#include <simdjson.h>

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/text/added_token_matcher.h"
#include "gateway/text/bpe.h"
#include "gateway/text/detokenizer.h"
#include "gateway/text/file_reader.h"
#include "gateway/text/normalizer.h"
#include "gateway/text/pre_tokenizer.h"
#include "gateway/text/tokenizer_spec.h"

namespace tandem::gateway {
namespace {

constexpr size_t kMaxTextBytes = size_t{256} << 20;

struct AddedBytes {
  std::string bytes;
  bool special = false;
};

std::vector<AddedToken> Matched(const std::vector<AddedToken>& tokens, bool normalized,
                                const Normalizer& normalizer) {
  std::vector<AddedToken> out;
  for (const AddedToken& token : tokens) {
    if (token.normalized != normalized) continue;
    out.push_back(token);
    if (normalized) out.back().content = normalizer.Apply(token.content);
  }
  return out;
}

// The breaks inside [begin, end), relative to begin.
std::vector<size_t> BreaksWithin(std::span<const size_t> breaks, size_t begin, size_t end) {
  std::vector<size_t> out;
  for (auto it = std::upper_bound(breaks.begin(), breaks.end(), begin);
       it != breaks.end() && *it < end; ++it) {
    out.push_back(*it - begin);
  }
  return out;
}

}  // namespace

struct Tokenizer::State {
  TokenizerConfig config;
  std::vector<AddedToken> added_tokens;
  absl::flat_hash_map<TokenId, AddedBytes> added_by_id;
  absl::flat_hash_map<std::string, TokenId> added_by_content;
  Normalizer normalizer{{}};
  AddedTokenMatcher raw_matcher{{}};         // tokens looked for in the text as it is
  AddedTokenMatcher normalized_matcher{{}};  // and in the normalized text
  PreTokenizer pre_tokenizer;
  BpeModel bpe;
  std::vector<TokenId> prefix_ids;
  std::vector<TokenId> suffix_ids;
  uint32_t vocab_size = 0;
  std::optional<TokenId> bos_id;
  std::optional<TokenId> eos_id;
};

namespace {

// One call's working memory and output.
class Encoder {
 public:
  Encoder(const Normalizer& normalizer, const AddedTokenMatcher* raw,
          const AddedTokenMatcher* normalized, const PreTokenizer& pre_tokenizer,
          const BpeModel& bpe, std::vector<TokenId>* out)
      : normalizer_(normalizer),
        raw_(raw),
        normalized_(normalized),
        pre_tokenizer_(pre_tokenizer),
        bpe_(bpe),
        out_(out) {}

  absl::Status Encode(std::string_view text, std::span<const size_t> breaks) {
    return ForSegments(raw_, text, breaks, [&](std::string_view part, std::vector<size_t> inside) {
      return EncodeRaw(part, std::move(inside));
    });
  }

 private:
  // Appends the ids of the matcher's tokens and calls `encode` for the text between them.
  template <typename Function>
  absl::Status ForSegments(const AddedTokenMatcher* matcher, std::string_view text,
                           std::span<const size_t> breaks, Function encode) {
    size_t done = 0;
    if (matcher != nullptr) {
      for (const AddedTokenMatcher::Match& match : matcher->Find(text, breaks)) {
        if (done < match.begin) {
          RETURN_IF_ERROR(encode(text.substr(done, match.begin - done),
                                 BreaksWithin(breaks, done, match.begin)));
        }
        out_->push_back(match.id);
        done = match.end;
      }
    }
    if (done == text.size()) return absl::OkStatus();
    return encode(text.substr(done), BreaksWithin(breaks, done, text.size()));
  }

  absl::Status EncodeRaw(std::string_view text, std::vector<size_t> breaks) {
    PromptText normalized;
    std::string_view view = text;
    if (!normalizer_.IsNormalized(text)) {
      normalized = normalizer_.Apply(PromptText{std::string(text), std::move(breaks)});
      view = normalized.text;
      breaks = std::move(normalized.breaks);
    }
    return ForSegments(normalized_, view, breaks, [&](std::string_view part, std::vector<size_t>) {
      return EncodePlain(part);
    });
  }

  absl::Status EncodePlain(std::string_view text) {
    words_.text.assign(text);
    words_.spans.assign(1, {0, text.size()});
    RETURN_IF_ERROR(pre_tokenizer_.Split(&words_, &regex_scratch_));
    const std::string_view all = words_.text;
    for (const WordSpan& span : words_.spans) {
      bpe_.EncodeWord(all.substr(span.begin, span.end - span.begin), &bpe_scratch_, out_);
    }
    return absl::OkStatus();
  }

  const Normalizer& normalizer_;
  const AddedTokenMatcher* raw_;
  const AddedTokenMatcher* normalized_;
  const PreTokenizer& pre_tokenizer_;
  const BpeModel& bpe_;
  std::vector<TokenId>* out_;
  Words words_;
  Regex::Scratch regex_scratch_;
  BpeModel::Scratch bpe_scratch_;
};

// Puts the BOS and EOS that tokenizer_config.json asks for around what the file's own template
// adds.
absl::Status ApplyConfiguredEnds(const TokenizerConfig& config, std::optional<TokenId> bos,
                                 std::optional<TokenId> eos, TokenizerSpec* spec) {
  if (config.add_bos_token.value_or(false)) {
    if (!bos) {
      return absl::InvalidArgumentError(
          "tokenizer_config.json: add_bos_token is true but bos_token is not a known token");
    }
    if (spec->prefix_ids.empty() || spec->prefix_ids.front() != *bos) {
      spec->prefix_ids.insert(spec->prefix_ids.begin(), *bos);
    }
  }
  if (config.add_eos_token.value_or(false)) {
    if (!eos) {
      return absl::InvalidArgumentError(
          "tokenizer_config.json: add_eos_token is true but eos_token is not a known token");
    }
    if (spec->suffix_ids.empty() || spec->suffix_ids.back() != *eos) {
      spec->suffix_ids.push_back(*eos);
    }
  }
  return absl::OkStatus();
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<const State> state) : state_(std::move(state)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::filesystem::path& model_dir) {
  ASSIGN_OR_RETURN(TokenizerConfig config, LoadTokenizerConfig(model_dir));
  const std::filesystem::path path = model_dir / "tokenizer.json";
  ASSIGN_OR_RETURN(const std::string json, ReadTextFile(path, kMaxTokenizerBytes));
  return FromJson(json, path.string(), std::move(config));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(std::string_view tokenizer_json,
                                                               std::string_view source,
                                                               TokenizerConfig config) {
  ASSIGN_OR_RETURN(TokenizerSpec spec, ParseTokenizerSpec(tokenizer_json, source));
  return FromSpec(std::move(spec), source, std::move(config));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromSpec(TokenizerSpec spec,
                                                               std::string_view source,
                                                               TokenizerConfig config) {
  auto state = std::make_unique<State>();
  state->normalizer = Normalizer(std::move(spec.normalizers));
  ASSIGN_OR_RETURN(state->pre_tokenizer, PreTokenizer::Build(spec.pre_tokenizers, source));
  ASSIGN_OR_RETURN(state->bpe, BpeModel::Build(spec.model, source));
  state->vocab_size = state->bpe.size();
  for (const AddedToken& token : spec.added_tokens) {
    state->added_by_id[token.id] = {BpeModel::SpellingToBytes(token.content), token.special};
    state->added_by_content.try_emplace(token.content, token.id);
    state->vocab_size = std::max(state->vocab_size, token.id + 1);
  }
  state->raw_matcher = AddedTokenMatcher(Matched(spec.added_tokens, false, state->normalizer));
  state->normalized_matcher =
      AddedTokenMatcher(Matched(spec.added_tokens, true, state->normalizer));
  state->added_tokens = std::move(spec.added_tokens);
  state->config = std::move(config);

  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer(nullptr));
  State* const writable = state.get();
  tokenizer->state_ = std::move(state);
  const auto id_of = [&](const char* name) -> std::optional<TokenId> {
    const auto spelling = writable->config.SpecialToken(name);
    return spelling ? tokenizer->TokenToId(*spelling) : std::nullopt;
  };
  writable->bos_id = id_of("bos_token");
  writable->eos_id = id_of("eos_token");
  RETURN_IF_ERROR(ApplyConfiguredEnds(writable->config, writable->bos_id, writable->eos_id, &spec));
  for (const std::vector<TokenId>* ids : {&spec.prefix_ids, &spec.suffix_ids}) {
    for (const TokenId id : *ids) {
      if (id >= writable->vocab_size) {
        return absl::InvalidArgumentError(
            absl::StrCat(std::string(source), ": post_processor: unknown token id ", id));
      }
    }
  }
  writable->prefix_ids = std::move(spec.prefix_ids);
  writable->suffix_ids = std::move(spec.suffix_ids);
  return tokenizer;
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::Encode(std::string_view text,
                                                       EncodeOptions options) const {
  return EncodeImpl(text, {}, options);
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::Encode(const PromptText& prompt,
                                                       EncodeOptions options) const {
  return EncodeImpl(prompt.text, prompt.breaks, options);
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::EncodeImpl(std::string_view text,
                                                           std::span<const size_t> breaks,
                                                           EncodeOptions options) const {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat("text has ", text.size(), " bytes, at most ",
                                                   kMaxTextBytes, " are tokenized"));
  }
  if (!simdjson::validate_utf8(text.data(), text.size())) {
    return absl::InvalidArgumentError("text is not valid UTF-8");
  }
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 4 + 8);
  if (options.add_special_tokens) {
    ids.insert(ids.end(), state_->prefix_ids.begin(), state_->prefix_ids.end());
  }
  const bool parse = options.parse_special;
  Encoder encoder(state_->normalizer, parse ? &state_->raw_matcher : nullptr,
                  parse ? &state_->normalized_matcher : nullptr, state_->pre_tokenizer, state_->bpe,
                  &ids);
  RETURN_IF_ERROR(encoder.Encode(text, breaks));
  if (options.add_special_tokens) {
    ids.insert(ids.end(), state_->suffix_ids.begin(), state_->suffix_ids.end());
  }
  return ids;
}

std::string Tokenizer::Decode(std::span<const TokenId> ids, DecodeOptions options) const {
  std::string text;
  Detokenizer detokenizer(this, options);
  for (const TokenId id : ids) detokenizer.Append(id, &text);
  detokenizer.Flush(&text);
  return text;
}

std::string_view Tokenizer::TokenBytes(TokenId id) const {
  const auto it = state_->added_by_id.find(id);
  return it != state_->added_by_id.end() ? std::string_view(it->second.bytes)
                                         : state_->bpe.TokenBytes(id);
}

bool Tokenizer::IsSpecial(TokenId id) const {
  const auto it = state_->added_by_id.find(id);
  return it != state_->added_by_id.end() && it->second.special;
}

std::optional<TokenId> Tokenizer::TokenToId(std::string_view spelling) const {
  const auto it = state_->added_by_content.find(std::string(spelling));
  if (it != state_->added_by_content.end()) return it->second;
  return state_->bpe.Find(spelling);
}

uint32_t Tokenizer::vocab_size() const { return state_->vocab_size; }
std::optional<TokenId> Tokenizer::bos_id() const { return state_->bos_id; }
std::optional<TokenId> Tokenizer::eos_id() const { return state_->eos_id; }
const std::vector<AddedToken>& Tokenizer::added_tokens() const { return state_->added_tokens; }
const TokenizerConfig& Tokenizer::config() const { return state_->config; }

}  // namespace tandem::gateway
