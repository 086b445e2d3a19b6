#define PCRE2_CODE_UNIT_WIDTH 8
#include "gateway/text/regex.h"

#include <pcre2.h>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "gateway/text/utf8.h"

namespace tandem::gateway {
namespace {

// Steps of backtracking per match. A run of a million blanks needs about a million; a pattern that
// needs more than this per token has gone exponential (or quadratic on megabytes).
constexpr uint32_t kMatchLimit = 20'000'000;
constexpr size_t kJitStackStartBytes = size_t{32} << 10;
constexpr size_t kJitStackMaxBytes = size_t{1} << 20;
constexpr size_t kHeapLimitKib = 64 << 10;  // for the interpreter, where there is no JIT
constexpr uint32_t kMaxNesting = 64;

// White_Space of the Unicode character database. PCRE2's own \s also takes U+180E.
constexpr std::string_view kSpaces =
    R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

std::string PcreError(int code) {
  PCRE2_UCHAR message[256];
  if (pcre2_get_error_message(code, message, sizeof(message)) < 0) return "unknown error";
  return reinterpret_cast<const char*>(message);
}

absl::Status NoEquivalent(std::string_view what) {
  return absl::UnimplementedError(
      absl::StrCat("pattern uses ", std::string(what), ", which is not supported"));
}

// Appends the translation of the escape `\c`; false if it has none.
bool AppendEscape(char c, bool in_class, std::string* out) {
  switch (c) {
    case 's':
      absl::StrAppend(out, in_class ? "" : "[", std::string(kSpaces), in_class ? "" : "]");
      return true;
    case 'S':
      if (in_class) return false;
      absl::StrAppend(out, "[^", std::string(kSpaces), "]");
      return true;
    case 'h':
      absl::StrAppend(out, in_class ? "0-9A-Fa-f" : "[0-9A-Fa-f]");
      return true;
    case 'H':
      if (in_class) return false;
      absl::StrAppend(out, "[^0-9A-Fa-f]");
      return true;
    // Named or numbered calls, conditions on the last match, code in hexadecimal of another form.
    case 'g':
    case 'k':
    case 'K':
    case 'C':
    case 'Q':
    case 'E':
    case 'y':
    case 'Y':
    case 'M':
    case 'O':
    case 'N':
    case 'c':
    case 'o':
      return false;
    default:
      out->push_back('\\');
      out->push_back(c);
      return true;
  }
}

}  // namespace

absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  size_t class_start = 0;  // offset of the first member
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const char next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (c == '\\') {
      if (i + 1 == pattern.size()) return absl::InvalidArgumentError("pattern ends in a backslash");
      if (!AppendEscape(next, in_class, &out)) {
        return NoEquivalent(
            absl::StrCat("\\", std::string(1, next), in_class ? " in a class" : ""));
      }
      ++i;
    } else if (!in_class && c == '[') {
      in_class = true;
      out.push_back(c);
      if (next == '^') {
        out.push_back('^');
        ++i;
      }
      class_start = i + 1;
    } else if (in_class && c == '[') {
      const size_t end = next == ':' ? pattern.find(":]", i + 2) : std::string_view::npos;
      if (end == std::string_view::npos) return NoEquivalent("a class inside a class");
      out.append(pattern.substr(i, end + 2 - i));
      i = end + 1;
    } else if (in_class && c == '&' && next == '&') {
      return NoEquivalent("an intersection of classes (&&)");
    } else {
      if (in_class && c == ']' && i > class_start) in_class = false;
      if (!in_class && c == '(' && next == '*') return NoEquivalent("a verb (*...)");
      out.push_back(c);
    }
  }
  return out;
}

struct Regex::Scratch::State {
  pcre2_match_data* data = pcre2_match_data_create(4, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStackStartBytes, kJitStackMaxBytes, nullptr);
};

Regex::Scratch::Scratch() : state_(std::make_unique<State>()) {
  TANDEM_CHECK(state_->data != nullptr && state_->context != nullptr);
  pcre2_set_match_limit(state_->context, kMatchLimit);
  pcre2_set_heap_limit(state_->context, kHeapLimitKib);
  if (state_->stack != nullptr) pcre2_jit_stack_assign(state_->context, nullptr, state_->stack);
}

Regex::Scratch::~Scratch() {
  if (state_->stack != nullptr) pcre2_jit_stack_free(state_->stack);
  pcre2_match_context_free(state_->context);
  pcre2_match_data_free(state_->data);
}

void Regex::Deleter::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

absl::StatusOr<Regex> Regex::CompilePcre(const std::string& pattern, uint32_t options) {
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  TANDEM_CHECK(context != nullptr);
  pcre2_set_parens_nest_limit(context, kMaxNesting);
  int error = 0;
  PCRE2_SIZE offset = 0;
  Regex regex;
  regex.code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                  options | PCRE2_UTF, &error, &offset, context));
  pcre2_compile_context_free(context);
  if (regex.code_ == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("pattern does not compile at offset ", offset, ": ", PcreError(error)));
  }
  size_t bytes = 0;
  pcre2_pattern_info(regex.code_.get(), PCRE2_INFO_SIZE, &bytes);
  // Nested counted repeats multiply: a short pattern may compile to megabytes.
  if (bytes > (size_t{1} << 20)) return absl::InvalidArgumentError("pattern is too large");
  // Without JIT (refused by hardened kernels) the interpreter gives the same matches.
  pcre2_jit_compile(regex.code_.get(), PCRE2_JIT_COMPLETE);
  return regex;
}

absl::StatusOr<Regex> Regex::Compile(std::string_view pattern) {
  ASSIGN_OR_RETURN(const std::string translated, TranslateOniguruma(pattern));
  return CompilePcre(translated, PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C);
}

absl::StatusOr<Regex> Regex::CompileLiteral(std::string_view text) {
  return CompilePcre(std::string(text), PCRE2_LITERAL);
}

absl::Status Regex::Next(std::string_view subject, size_t offset, Scratch* scratch, size_t* begin,
                         size_t* end) const {
  *begin = *end = 0;
  while (offset < subject.size()) {
    const int count =
        pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(),
                    offset, PCRE2_NO_UTF_CHECK, scratch->state_->data, scratch->state_->context);
    if (count == PCRE2_ERROR_NOMATCH) return absl::OkStatus();
    if (count < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("the tokenizer's pattern cannot split this text: ", PcreError(count)));
    }
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(scratch->state_->data);
    if (bounds[1] > bounds[0] && bounds[0] >= offset) {
      *begin = bounds[0];
      *end = bounds[1];
      return absl::OkStatus();
    }
    offset = bounds[1] > offset ? bounds[1] : offset;
    offset += Utf8Length(subject[offset < subject.size() ? offset : subject.size() - 1]);
  }
  return absl::OkStatus();
}

}  // namespace tandem::gateway
