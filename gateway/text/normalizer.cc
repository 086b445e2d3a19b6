#include "gateway/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>

#include "common/base/check.h"
#include "gateway/text/utf8.h"

namespace tandem::gateway {
namespace {

struct Range {
  char32_t first, last;
};

// Characters that NFC leaves alone whatever stands beside them: no decomposition, no combining
// class, and never the second of a composed pair. A test checks them against utf8proc.
constexpr Range kStable[] = {
    {0x0000, 0x02FF},   // Latin, punctuation, IPA: below the first combining mark
    {0x0400, 0x0482},   // Cyrillic
    {0x2010, 0x2027},   // dashes, quotes, bullets
    {0x2030, 0x205E},   // per mille ... primes
    {0x2190, 0x2199},   // arrows
    {0x2500, 0x27BF},   // box drawing ... dingbats
    {0x3000, 0x3029},   // CJK punctuation
    {0x3030, 0x3098},   // more of it, hiragana
    {0x309B, 0x30FF},   // katakana
    {0x3400, 0x4DBF},   // CJK extension A
    {0x4E00, 0x9FFF},   // CJK unified ideographs
    {0xAC00, 0xD7A3},   // hangul syllables
    {0xFF01, 0xFFEE},   // full width forms
    {0x1F300, 0x1FAFF}  // pictographs
};

bool IsStable(char32_t code) {
  for (const Range& range : kStable) {
    if (code <= range.last) return code >= range.first;
  }
  return false;
}

bool IsStableNfc(std::string_view text) {
  for (size_t i = 0; i < text.size(); i += Utf8Length(text[i])) {
    if (static_cast<unsigned char>(text[i]) >= 0xCC && !IsStable(Utf8CodePoint(text, i))) {
      return false;
    }
  }
  return true;
}

bool IsAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// Puts each run of combining marks into canonical order (Unicode standard, section 3.11,
// D108-D109).
void OrderMarks(std::vector<utf8proc_int32_t>* codes) {
  const auto combining_class = [](utf8proc_int32_t code) {
    return utf8proc_get_property(code)->combining_class;
  };
  auto it = codes->begin();
  while (it != codes->end()) {
    if (combining_class(*it) == 0) {
      ++it;
      continue;
    }
    const auto run_end =
        std::find_if(it, codes->end(), [&](auto code) { return combining_class(code) == 0; });
    std::stable_sort(it, run_end,
                     [&](auto a, auto b) { return combining_class(a) < combining_class(b); });
    it = run_end;
  }
}

std::vector<utf8proc_int32_t> Decompose(std::string_view text, bool compatibility) {
  const int options = UTF8PROC_DECOMPOSE | UTF8PROC_STABLE |
                      (compatibility ? static_cast<int>(UTF8PROC_COMPAT) : 0);
  std::vector<utf8proc_int32_t> codes;
  codes.reserve(text.size());
  for (size_t i = 0; i < text.size(); i += Utf8Length(text[i])) {
    const auto code = static_cast<utf8proc_int32_t>(Utf8CodePoint(text, i));
    // The longest decomposition of one code point is 18 (U+FDFA).
    utf8proc_int32_t parts[32];
    int boundclass = 0;
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        code, parts, 32, static_cast<utf8proc_option_t>(options), &boundclass);
    if (count > 0 && count <= 32) {
      codes.insert(codes.end(), parts, parts + count);
    } else {
      codes.push_back(code);
    }
  }
  OrderMarks(&codes);
  return codes;
}

std::string Normalize(std::string_view text, UnicodeForm form) {
  const bool compatibility = form == UnicodeForm::kNfkc || form == UnicodeForm::kNfkd;
  std::vector<utf8proc_int32_t> codes = Decompose(text, compatibility);
  if (form == UnicodeForm::kNfc || form == UnicodeForm::kNfkc) {
    const utf8proc_ssize_t size = utf8proc_normalize_utf32(
        codes.data(), static_cast<utf8proc_ssize_t>(codes.size()),
        static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    TANDEM_CHECK(size >= 0);
    codes.resize(static_cast<size_t>(size));
  }
  std::string out;
  out.reserve(text.size());
  for (const utf8proc_int32_t code : codes) {
    utf8proc_uint8_t bytes[4];
    const utf8proc_ssize_t count = utf8proc_encode_char(code, bytes);
    out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
  }
  return out;
}

}  // namespace

bool Normalizer::IsNormalized(std::string_view text) const {
  if (forms_.empty() || IsAscii(text)) return true;
  const bool only_nfc = std::all_of(forms_.begin(), forms_.end(),
                                    [](UnicodeForm form) { return form == UnicodeForm::kNfc; });
  return only_nfc && IsStableNfc(text);
}

std::string Normalizer::Apply(std::string_view text) const {
  std::string out(text);
  if (IsNormalized(text)) return out;
  for (const UnicodeForm form : forms_) out = Normalize(out, form);
  return out;
}

PromptText Normalizer::Apply(const PromptText& text) const {
  PromptText out;
  size_t begin = 0;
  const std::string_view all = text.text;
  for (const size_t offset : text.breaks) {
    out.text += Apply(all.substr(begin, offset - begin));
    out.breaks.push_back(out.text.size());
    begin = offset;
  }
  out.text += Apply(all.substr(begin));
  return out;
}

}  // namespace tandem::gateway
