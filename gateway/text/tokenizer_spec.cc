#include "gateway/text/tokenizer_spec.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/text/json_reader.h"

namespace tandem::gateway {
namespace {

absl::StatusOr<std::string_view> TypeOf(const JsonReader& value) {
  if (!value.is_object()) return value.Invalid("must be an object with a \"type\"");
  return value.Member("type").String();
}

absl::Status UnknownType(const JsonReader& value, std::string_view type, std::string_view known) {
  return value.Unsupported(absl::StrCat("type \"", Excerpt(type),
                                        "\" is not supported (known: ", std::string(known), ")"));
}

absl::Status ParseNormalizer(const JsonReader& value, std::vector<UnicodeForm>* out) {
  if (value.is_null()) return absl::OkStatus();
  if (out->size() >= kMaxSteps) return value.Invalid("too many normalizers");
  ASSIGN_OR_RETURN(const std::string_view type, TypeOf(value));
  if (type == "Sequence") {
    RETURN_IF_ERROR(value.OnlyKeys({"type", "normalizers"}));
    const JsonReader list = value.Member("normalizers");
    ASSIGN_OR_RETURN(const auto array, list.Array());
    size_t index = 0;
    for (const auto element : array) {
      RETURN_IF_ERROR(ParseNormalizer(list.Element(element, index++), out));
    }
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(value.OnlyKeys({"type"}));
  if (type == "NFC") {
    out->push_back(UnicodeForm::kNfc);
  } else if (type == "NFD") {
    out->push_back(UnicodeForm::kNfd);
  } else if (type == "NFKC") {
    out->push_back(UnicodeForm::kNfkc);
  } else if (type == "NFKD") {
    out->push_back(UnicodeForm::kNfkd);
  } else {
    return UnknownType(value, type, "NFC, NFD, NFKC, NFKD, Sequence");
  }
  return absl::OkStatus();
}

absl::StatusOr<SplitBehavior> ParseBehavior(const JsonReader& value) {
  ASSIGN_OR_RETURN(const std::string_view name, value.String());
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return value.Unsupported(absl::StrCat("\"", Excerpt(name), "\" is not supported"));
}

absl::StatusOr<PreTokenizerStep> ParseSplit(const JsonReader& value) {
  RETURN_IF_ERROR(value.OnlyKeys({"type", "pattern", "behavior", "invert"}));
  PreTokenizerStep step;
  const JsonReader pattern = value.Member("pattern");
  RETURN_IF_ERROR(pattern.OnlyKeys({"Regex", "String"}));
  step.literal = !pattern.Member("String").is_null();
  ASSIGN_OR_RETURN(const std::string_view text,
                   pattern.Member(step.literal ? "String" : "Regex").String());
  if (text.empty()) return pattern.Invalid("is empty");
  if (text.size() > kMaxPatternBytes) return pattern.Invalid("is too long");
  step.pattern = text;
  ASSIGN_OR_RETURN(step.behavior, ParseBehavior(value.Member("behavior")));
  ASSIGN_OR_RETURN(step.invert, value.Member("invert").Bool(false));
  return step;
}

absl::Status ParseByteLevel(const JsonReader& value, std::vector<PreTokenizerStep>* out) {
  RETURN_IF_ERROR(value.OnlyKeys({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
  ASSIGN_OR_RETURN(const bool prefix_space, value.Member("add_prefix_space").Bool(true));
  ASSIGN_OR_RETURN(const bool use_regex, value.Member("use_regex").Bool(true));
  if (prefix_space) {
    PreTokenizerStep step;
    step.kind = PreTokenizerStep::Kind::kPrefixSpace;
    out->push_back(std::move(step));
  }
  if (use_regex) {
    PreTokenizerStep step;
    step.pattern = kGpt2Pattern;
    out->push_back(std::move(step));
  }
  return absl::OkStatus();
}

// Appends the steps of `value`; `*byte_level` says whether the bytes' mapping has been reached: it
// must be, and nothing may follow it.
absl::Status ParsePreTokenizer(const JsonReader& value, std::vector<PreTokenizerStep>* out,
                               bool* byte_level) {
  ASSIGN_OR_RETURN(const std::string_view type, TypeOf(value));
  if (out->size() >= kMaxSteps) return value.Invalid("too many pre-tokenizers");
  if (*byte_level) return value.Unsupported("a pre-tokenizer after ByteLevel is not supported");
  if (type == "Sequence") {
    RETURN_IF_ERROR(value.OnlyKeys({"type", "pretokenizers"}));
    const JsonReader list = value.Member("pretokenizers");
    ASSIGN_OR_RETURN(const auto array, list.Array());
    size_t index = 0;
    for (const auto element : array) {
      RETURN_IF_ERROR(ParsePreTokenizer(list.Element(element, index++), out, byte_level));
    }
    return absl::OkStatus();
  }
  if (type == "ByteLevel") {
    *byte_level = true;
    return ParseByteLevel(value, out);
  }
  if (type == "Split") {
    ASSIGN_OR_RETURN(PreTokenizerStep step, ParseSplit(value));
    out->push_back(std::move(step));
    return absl::OkStatus();
  }
  PreTokenizerStep step;
  if (type == "Digits") {
    RETURN_IF_ERROR(value.OnlyKeys({"type", "individual_digits"}));
    ASSIGN_OR_RETURN(const bool individual, value.Member("individual_digits").Bool(false));
    step.pattern = R"(\p{N})";
    step.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  } else if (type == "Punctuation") {
    RETURN_IF_ERROR(value.OnlyKeys({"type", "behavior"}));
    step.pattern = R"([\p{P}!-/:-@\[-`\{-~])";
    if (!value.Member("behavior").is_null()) {
      ASSIGN_OR_RETURN(step.behavior, ParseBehavior(value.Member("behavior")));
    }
  } else {
    return UnknownType(value, type, "Sequence, Split, ByteLevel, Digits, Punctuation");
  }
  out->push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status ParseDecoder(const JsonReader& value) {
  if (value.is_null()) return value.Unsupported("is missing; only ByteLevel is supported");
  ASSIGN_OR_RETURN(const std::string_view type, TypeOf(value));
  if (type == "Sequence") {
    RETURN_IF_ERROR(value.OnlyKeys({"type", "decoders"}));
    const JsonReader list = value.Member("decoders");
    ASSIGN_OR_RETURN(const auto array, list.Array());
    if (array.size() == 0) return list.Invalid("is empty");
    size_t index = 0;
    for (const auto element : array) {
      RETURN_IF_ERROR(ParseDecoder(list.Element(element, index++)));
    }
    return absl::OkStatus();
  }
  if (type != "ByteLevel") return UnknownType(value, type, "ByteLevel");
  return value.OnlyKeys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
}

// Appends the ids that the "single" template of a TemplateProcessing writes before and after the
// text.
absl::Status ParseTemplate(const JsonReader& value, TokenizerSpec* spec) {
  RETURN_IF_ERROR(value.OnlyKeys({"type", "single", "pair", "special_tokens"}));
  const JsonReader single = value.Member("single");
  ASSIGN_OR_RETURN(const auto parts, single.Array());
  bool after_text = false;
  size_t index = 0;
  for (const auto element : parts) {
    const JsonReader part = single.Element(element, index++);
    if (!part.Member("Sequence").is_null()) {
      if (after_text) return part.Unsupported("the text appears twice");
      after_text = true;
      continue;
    }
    RETURN_IF_ERROR(part.OnlyKeys({"SpecialToken"}));
    ASSIGN_OR_RETURN(const std::string_view name,
                     part.Member("SpecialToken").Member("id").String());
    const JsonReader ids = value.Member("special_tokens").Member(name).Member("ids");
    ASSIGN_OR_RETURN(const auto array, ids.Array());
    if (index > kMaxSteps || array.size() > kMaxSteps) return ids.Invalid("too many ids");
    for (const auto id : array) {
      ASSIGN_OR_RETURN(const uint64_t number, ids.Element(id, 0).Unsigned());
      if (number > kMaxTokenId) return ids.Invalid("token id is too large");
      (after_text ? spec->suffix_ids : spec->prefix_ids).push_back(static_cast<TokenId>(number));
    }
  }
  if (!after_text) return single.Invalid("has no place for the text");
  return absl::OkStatus();
}

absl::Status ParsePostProcessor(const JsonReader& value, TokenizerSpec* spec) {
  if (value.is_null()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string_view type, TypeOf(value));
  if (type == "TemplateProcessing") {
    if (!spec->prefix_ids.empty() || !spec->suffix_ids.empty()) {
      return value.Unsupported("a second TemplateProcessing is not supported");
    }
    return ParseTemplate(value, spec);
  }
  if (type == "Sequence") {
    RETURN_IF_ERROR(value.OnlyKeys({"type", "processors"}));
    const JsonReader list = value.Member("processors");
    ASSIGN_OR_RETURN(const auto array, list.Array());
    size_t index = 0;
    for (const auto element : array) {
      RETURN_IF_ERROR(ParsePostProcessor(list.Element(element, index++), spec));
    }
    return absl::OkStatus();
  }
  // ByteLevel as post-processor only trims offsets, which nothing here uses.
  if (type == "ByteLevel") {
    return value.OnlyKeys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  }
  return UnknownType(value, type, "TemplateProcessing, ByteLevel, Sequence");
}

absl::Status ParseAddedTokens(const JsonReader& value, std::vector<AddedToken>* out) {
  if (value.is_null()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto array, value.Array());
  if (array.size() > kMaxAddedTokens) return value.Invalid("has too many entries");
  size_t index = 0;
  for (const auto element : array) {
    const JsonReader entry = value.Element(element, index++);
    RETURN_IF_ERROR(entry.OnlyKeys(
        {"id", "content", "special", "single_word", "lstrip", "rstrip", "normalized"}));
    AddedToken token;
    ASSIGN_OR_RETURN(const uint64_t id, entry.Member("id").Unsigned());
    if (id > kMaxTokenId) return entry.Invalid("token id is too large");
    token.id = static_cast<TokenId>(id);
    ASSIGN_OR_RETURN(const std::string_view content, entry.Member("content").String());
    if (content.size() > kMaxAddedTokenBytes) return entry.Invalid("content is too long");
    token.content = content;
    ASSIGN_OR_RETURN(token.special, entry.Member("special").Bool(false));
    ASSIGN_OR_RETURN(token.single_word, entry.Member("single_word").Bool(false));
    ASSIGN_OR_RETURN(token.lstrip, entry.Member("lstrip").Bool(false));
    ASSIGN_OR_RETURN(token.rstrip, entry.Member("rstrip").Bool(false));
    ASSIGN_OR_RETURN(token.normalized, entry.Member("normalized").Bool(!token.special));
    if (!token.content.empty()) out->push_back(std::move(token));
  }
  return absl::OkStatus();
}

absl::Status ParseMerge(const JsonReader& value, BpeSpec* out) {
  if (value.is_string()) {
    ASSIGN_OR_RETURN(const std::string_view both, value.String());
    const auto merge = SplitMerge(both);
    if (!merge) return value.Invalid("a merge must be two parts with one blank between");
    out->merges.push_back(*merge);
    return absl::OkStatus();
  }
  std::string_view left;
  std::string_view right;
  ASSIGN_OR_RETURN(const auto pair, value.Array());
  if (pair.size() != 2 || pair.at(0).get(left) != simdjson::SUCCESS ||
      pair.at(1).get(right) != simdjson::SUCCESS) {
    return value.Invalid("a merge must be two strings");
  }
  if (left.empty() || right.empty()) return value.Invalid("a merge has an empty part");
  out->merges.emplace_back(left, right);
  return absl::OkStatus();
}

absl::Status CheckModelOptions(const JsonReader& model) {
  RETURN_IF_ERROR(model.OnlyKeys({"type", "dropout", "unk_token", "continuing_subword_prefix",
                                  "end_of_word_suffix", "fuse_unk", "byte_fallback",
                                  "ignore_merges", "vocab", "merges"}));
  if (!model.Member("type").is_null()) {
    ASSIGN_OR_RETURN(const std::string_view type, model.Member("type").String());
    if (type != "BPE") return UnknownType(model, type, "BPE");
  }
  const JsonReader dropout = model.Member("dropout");
  if (!dropout.is_null()) {
    double rate = 1;
    if (dropout.value().get(rate) != simdjson::SUCCESS || rate != 0) {
      return dropout.Unsupported("is not supported");
    }
  }
  ASSIGN_OR_RETURN(const bool byte_fallback, model.Member("byte_fallback").Bool(false));
  if (byte_fallback) return model.Member("byte_fallback").Unsupported("is not supported");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const JsonReader affix = model.Member(key);
    if (affix.is_null()) continue;
    ASSIGN_OR_RETURN(const std::string_view text, affix.String());
    if (!text.empty()) return affix.Unsupported("is not supported");
  }
  return absl::OkStatus();
}

absl::Status ParseModel(const JsonReader& model, BpeSpec* out) {
  RETURN_IF_ERROR(CheckModelOptions(model));
  ASSIGN_OR_RETURN(out->ignore_merges, model.Member("ignore_merges").Bool(false));
  const JsonReader vocab = model.Member("vocab");
  ASSIGN_OR_RETURN(const auto entries, vocab.Object());
  out->vocab.reserve(entries.size());
  for (const auto& [spelling, value] : entries) {
    uint64_t id = 0;
    if (value.get(id) != simdjson::SUCCESS || id > kMaxTokenId) {
      return vocab.Invalid(
          absl::StrCat("id of \"", Excerpt(spelling), "\" is not a number up to ", kMaxTokenId));
    }
    out->vocab.emplace_back(spelling, static_cast<TokenId>(id));
  }
  const JsonReader merges = model.Member("merges");
  ASSIGN_OR_RETURN(const auto list, merges.Array());
  out->merges.reserve(list.size());
  for (const auto element : list) {
    // The path is made only for errors: there are hundreds of thousands of merges.
    if (!ParseMerge(JsonReader(element, {}), out).ok()) {
      return ParseMerge(merges.Element(element, out->merges.size()), out);
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<std::pair<std::string_view, std::string_view>> SplitMerge(std::string_view text) {
  const size_t blank = text.find(' ');
  if (blank == std::string_view::npos || text.find(' ', blank + 1) != std::string_view::npos) {
    return std::nullopt;
  }
  if (blank == 0 || blank + 1 == text.size()) return std::nullopt;
  return std::pair(text.substr(0, blank), text.substr(blank + 1));
}

absl::StatusOr<TokenizerSpec> ParseTokenizerSpec(std::string_view json, std::string_view source) {
  constexpr size_t kMaxDepth = 64;
  const std::string name(source);
  if (json.size() > kMaxTokenizerBytes) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": larger than ", kMaxTokenizerBytes));
  }
  auto parser = std::make_shared<simdjson::dom::parser>(kMaxTokenizerBytes + 1);
  simdjson::error_code error = parser->allocate(json.size() + 1, kMaxDepth);
  simdjson::dom::element document;
  if (error == simdjson::SUCCESS) error = parser->parse(json.data(), json.size()).get(document);
  if (error != simdjson::SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": not JSON: ", simdjson::error_message(error)));
  }
  const JsonReader root(document, name + ": ");
  RETURN_IF_ERROR(root.OnlyKeys({"version", "truncation", "padding", "added_tokens", "normalizer",
                                 "pre_tokenizer", "post_processor", "decoder", "model"}));
  TokenizerSpec spec;
  spec.document = parser;
  RETURN_IF_ERROR(ParseNormalizer(root.Member("normalizer"), &spec.normalizers));
  bool byte_level = false;
  RETURN_IF_ERROR(
      ParsePreTokenizer(root.Member("pre_tokenizer"), &spec.pre_tokenizers, &byte_level));
  if (!byte_level) {
    return root.Member("pre_tokenizer")
        .Unsupported("has no ByteLevel; only byte-level BPE is supported");
  }
  RETURN_IF_ERROR(ParseDecoder(root.Member("decoder")));
  RETURN_IF_ERROR(ParsePostProcessor(root.Member("post_processor"), &spec));
  RETURN_IF_ERROR(ParseAddedTokens(root.Member("added_tokens"), &spec.added_tokens));
  RETURN_IF_ERROR(ParseModel(root.Member("model"), &spec.model));
  return spec;
}

}  // namespace tandem::gateway
