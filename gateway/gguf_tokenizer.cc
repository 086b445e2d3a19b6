#include "gateway/gguf_tokenizer.h"

#include <simdjson.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"

namespace tandem::gateway {
namespace {

// tokenizer.ggml.token_type
enum class TokenType : int64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

constexpr std::string_view kDigit = R"(\p{N})";
// notes/models.md section 6, alternatives A L N P R T W; digits one by one or in threes.
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDeepseekNumbers = R"(\p{N}{1,3})";
constexpr std::string_view kDeepseekHan = "[一-龥぀-ゟ゠-ヿ]+";
constexpr std::string_view kDeepseekWords =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr std::string_view kGpt2Steps[] = {kGpt2Pattern};
constexpr std::string_view kSmollmSteps[] = {kDigit, kGpt2Pattern};
constexpr std::string_view kQwen2Steps[] = {kQwen2};
constexpr std::string_view kLlama3Steps[] = {kLlama3};
constexpr std::string_view kDeepseekSteps[] = {kDeepseekNumbers, kDeepseekHan, kDeepseekWords};

struct PreType {
  std::string_view name;  // tokenizer.ggml.pre
  std::span<const std::string_view> steps;
  bool nfc = false;
  bool ignore_merges = false;
  bool add_bos = false;  // where the file does not say
};
constexpr PreType kPreTypes[] = {
    {"gpt-2", kGpt2Steps},
    {"smollm", kSmollmSteps},
    {"llama-bpe", kLlama3Steps, false, true, true},
    {"llama3", kLlama3Steps, false, true, true},
    {"llama-v3", kLlama3Steps, false, true, true},
    {"qwen2", kQwen2Steps, true},
    {"deepseek-r1-qwen", kQwen2Steps, true},
    {"deepseek-v3", kDeepseekSteps},
};

constexpr const char* kModelKey = "tokenizer.ggml.model";
constexpr const char* kPreKey = "tokenizer.ggml.pre";
constexpr const char* kTokensKey = "tokenizer.ggml.tokens";
constexpr const char* kTypesKey = "tokenizer.ggml.token_type";
constexpr const char* kMergesKey = "tokenizer.ggml.merges";
constexpr const char* kTemplateKey = "tokenizer.chat_template";

class Reader {
 public:
  explicit Reader(const GgufModel& model) : model_(model) {}

  absl::StatusOr<GgufTokenizer> Read() {
    RETURN_IF_ERROR(ReadPreType());
    RETURN_IF_ERROR(ReadTokens());
    RETURN_IF_ERROR(ReadMerges());
    RETURN_IF_ERROR(ReadSpecialTokens());
    RETURN_IF_ERROR(ReadTemplates());
    return std::move(out_);
  }

 private:
  absl::Status ReadPreType();
  absl::Status ReadTokens();
  absl::Status AddToken(size_t index, std::string_view text, TokenType type);
  absl::Status ReadMerges();
  absl::Status ReadSpecialTokens();
  absl::Status ReadTemplates();
  absl::Status AddTemplate(const std::string& key, const std::string& name);

  const GgufModel& model_;
  const PreType* pre_ = nullptr;
  const std::vector<std::string_view>* tokens_ = nullptr;
  GgufTokenizer out_;
};

bool IsUtf8(std::string_view text) { return simdjson::validate_utf8(text.data(), text.size()); }

absl::Status Reader::ReadPreType() {
  ASSIGN_OR_RETURN(const auto kind, model_.String(kModelKey));
  if (!kind) return absl::NotFoundError(model_.path() + ": holds no tokenizer");
  if (*kind != "gpt2") {
    return absl::UnimplementedError(
        absl::StrCat(model_.path(), ": key '", kModelKey, "': ", QuoteForMessage(*kind),
                     " is not supported, only gpt2 (byte-level BPE) is"));
  }
  ASSIGN_OR_RETURN(const auto name, model_.String(kPreKey));
  std::string known;
  for (const PreType& pre : kPreTypes) {
    if (name && pre.name == *name) pre_ = &pre;
    absl::StrAppend(&known, known.empty() ? "" : ", ", std::string(pre.name));
  }
  if (pre_ == nullptr) {
    return absl::UnimplementedError(absl::StrCat(
        model_.path(), ": key '", kPreKey, "': ", name ? QuoteForMessage(*name) : "none given",
        "; supported are ", known));
  }
  if (pre_->nfc) out_.spec.normalizers.push_back(UnicodeForm::kNfc);
  for (std::string_view pattern : pre_->steps) {
    PreTokenizerStep step;
    step.pattern = pattern;
    out_.spec.pre_tokenizers.push_back(std::move(step));
  }
  out_.spec.model.ignore_merges = pre_->ignore_merges;
  out_.spec.model.skips_unknown_bytes = true;  // SmolLM2 was trained without some control bytes
  return absl::OkStatus();
}

absl::Status Reader::ReadTokens() {
  ASSIGN_OR_RETURN(tokens_, model_.Strings(kTokensKey));
  if (tokens_ == nullptr || tokens_->empty()) return model_.KeyError(kTokensKey, "is missing");
  if (tokens_->size() > kMaxTokenId) return model_.KeyError(kTokensKey, "has too many entries");
  ASSIGN_OR_RETURN(const auto* types, model_.Ints(kTypesKey));
  if (types != nullptr && types->size() != tokens_->size()) {
    return model_.KeyError(kTypesKey, absl::StrCat("has ", types->size(), " entries for ",
                                                   tokens_->size(), " tokens"));
  }
  out_.spec.model.vocab.reserve(tokens_->size());
  for (size_t i = 0; i < tokens_->size(); ++i) {
    const auto type = types == nullptr ? TokenType::kNormal : static_cast<TokenType>((*types)[i]);
    RETURN_IF_ERROR(AddToken(i, (*tokens_)[i], type));
  }
  return absl::OkStatus();
}

absl::Status Reader::AddToken(size_t index, std::string_view text, TokenType type) {
  if (!IsUtf8(text)) {
    return model_.KeyError(kTokensKey, absl::StrCat("token ", index, " is not UTF-8"));
  }
  // Fills up a padded vocabulary; no text is made of it.
  if (type == TokenType::kUnused || text.empty()) return absl::OkStatus();
  const auto id = static_cast<TokenId>(index);
  out_.spec.model.vocab.emplace_back(text, id);
  if (type == TokenType::kNormal || type == TokenType::kByte) return absl::OkStatus();
  if (text.size() > kMaxAddedTokenBytes || out_.spec.added_tokens.size() == kMaxAddedTokens) {
    return model_.KeyError(kTokensKey,
                           absl::StrCat("token ", index, " is too long, or one added too many"));
  }
  AddedToken token;
  token.id = id;
  token.content = text;
  token.special = type != TokenType::kUserDefined;
  out_.spec.added_tokens.push_back(std::move(token));
  return absl::OkStatus();
}

absl::Status Reader::ReadMerges() {
  ASSIGN_OR_RETURN(const auto* merges, model_.Strings(kMergesKey));
  if (merges == nullptr) return model_.KeyError(kMergesKey, "is missing");
  out_.spec.model.merges.reserve(merges->size());
  for (std::string_view text : *merges) {
    const auto merge = SplitMerge(text);
    if (!merge || !IsUtf8(text)) {
      return model_.KeyError(kMergesKey, absl::StrCat(QuoteForMessage(text), " is not two tokens"));
    }
    out_.spec.model.merges.push_back(*merge);
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadSpecialTokens() {
  for (const auto& [name, hub] :
       {std::pair("bos", "bos_token"), std::pair("eos", "eos_token"),
        std::pair("unknown", "unk_token"), std::pair("padding", "pad_token"),
        std::pair("seperator", "sep_token"), std::pair("mask", "mask_token")}) {  // as files spell
    const std::string key = absl::StrCat("tokenizer.ggml.", name, "_token_id");
    ASSIGN_OR_RETURN(const std::optional<int64_t> id, model_.Int(key));
    if (!id) continue;
    if (*id < 0 || *id >= static_cast<int64_t>(tokens_->size())) {
      return model_.KeyError(key,
                             absl::StrCat("is ", *id, ", there are ", tokens_->size(), " tokens"));
    }
    out_.config.special_tokens[hub] = (*tokens_)[static_cast<size_t>(*id)];
  }
  constexpr const char* kAddBos = "tokenizer.ggml.add_bos_token";
  ASSIGN_OR_RETURN(const auto add_bos, model_.Bool(kAddBos));
  ASSIGN_OR_RETURN(out_.config.add_eos_token, model_.Bool("tokenizer.ggml.add_eos_token"));
  out_.config.add_bos_token = add_bos.value_or(pre_->add_bos);
  if (*out_.config.add_bos_token && !out_.config.SpecialToken("bos_token")) {
    return model_.KeyError(kAddBos, "is true (or the default), but there is no bos_token_id");
  }
  return absl::OkStatus();
}

absl::Status Reader::AddTemplate(const std::string& key, const std::string& name) {
  constexpr size_t kMaxTemplateBytes = size_t{1} << 20;
  ASSIGN_OR_RETURN(const auto text, model_.String(key));
  if (!text) return absl::OkStatus();
  if (text->size() > kMaxTemplateBytes || !IsUtf8(*text)) {
    return model_.KeyError(key, "is too large, or not UTF-8");
  }
  out_.config.chat_templates[name] = *text;
  return absl::OkStatus();
}

absl::Status Reader::ReadTemplates() {
  constexpr const char* kNamesKey = "tokenizer.chat_templates";
  constexpr size_t kMaxTemplates = 32;
  RETURN_IF_ERROR(AddTemplate(kTemplateKey, "default"));
  ASSIGN_OR_RETURN(const auto* names, model_.Strings(kNamesKey));
  if (names == nullptr) return absl::OkStatus();
  if (names->size() > kMaxTemplates) return model_.KeyError(kNamesKey, "has too many entries");
  for (std::string_view name : *names) {
    RETURN_IF_ERROR(
        AddTemplate(absl::StrCat(kTemplateKey, ".", std::string(name)), std::string(name)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GgufTokenizer> ReadGgufTokenizer(const GgufModel& model) {
  return Reader(model).Read();
}

}  // namespace tandem::gateway
