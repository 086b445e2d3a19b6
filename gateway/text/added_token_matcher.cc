#include "gateway/text/added_token_matcher.h"

#include <utf8proc.h>

#include <algorithm>

#include "gateway/text/utf8.h"

namespace tandem::gateway {
namespace {

bool IsWordCharacter(char32_t code) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

bool IsSpace(char32_t code) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return true;
    default:
      return (code >= 9 && code <= 13) || code == 0x85;
  }
}

size_t PreviousCharacter(std::string_view text, size_t offset) {
  do --offset;
  while (offset > 0 && (text[offset] & 0xC0) == 0x80);
  return offset;
}

bool StandsAlone(std::string_view text, size_t begin, size_t end) {
  if (begin > 0 && IsWordCharacter(Utf8CodePoint(text, PreviousCharacter(text, begin)))) {
    return false;
  }
  return end == text.size() || !IsWordCharacter(Utf8CodePoint(text, end));
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  // The first of equal spellings wins.
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  std::erase_if(tokens_, [](const AddedToken& token) { return token.content.empty(); });
  tokens_.erase(
      std::unique(tokens_.begin(), tokens_.end(),
                  [](const AddedToken& a, const AddedToken& b) { return a.content == b.content; }),
      tokens_.end());
  for (uint32_t i = 0; i < tokens_.size(); ++i) {
    auto& [begin, end] = by_first_byte_[static_cast<unsigned char>(tokens_[i].content[0])];
    if (begin == end) begin = i;
    end = i + 1;
  }
}

const AddedToken* AddedTokenMatcher::LongestAt(std::string_view text, size_t offset) const {
  auto [begin, end] = by_first_byte_[static_cast<unsigned char>(text[offset])];
  const AddedToken* longest = nullptr;
  // tokens_[begin, end) share the text's first `depth` bytes; the shortest of them sorts first.
  for (size_t depth = 1; begin < end; ++depth) {
    if (tokens_[begin].content.size() == depth) {
      longest = &tokens_[begin];
      ++begin;
    }
    if (offset + depth >= text.size() || begin == end) break;
    const auto byte = static_cast<unsigned char>(text[offset + depth]);
    const auto at = [&](const AddedToken& token) {
      return static_cast<unsigned char>(token.content[depth]);
    };
    const auto first = tokens_.begin() + begin;
    const auto last = tokens_.begin() + end;
    const auto low = std::partition_point(first, last, [&](const auto& t) { return at(t) < byte; });
    const auto high = std::partition_point(low, last, [&](const auto& t) { return at(t) == byte; });
    begin = static_cast<uint32_t>(low - tokens_.begin());
    end = static_cast<uint32_t>(high - tokens_.begin());
  }
  return longest;
}

std::vector<AddedTokenMatcher::Match> AddedTokenMatcher::Find(
    std::string_view text, std::span<const size_t> breaks) const {
  std::vector<Match> out;
  if (tokens_.empty()) return out;
  size_t done = 0;  // matches' extended ends
  size_t next_break = 0;
  for (size_t offset = 0; offset < text.size();) {
    while (next_break < breaks.size() && breaks[next_break] <= offset) ++next_break;
    const size_t limit = next_break < breaks.size() ? breaks[next_break] : text.size();
    const AddedToken* token = LongestAt(text.substr(0, limit), offset);
    if (token == nullptr) {
      ++offset;
      continue;
    }
    size_t begin = offset;
    size_t end = offset + token->content.size();
    offset = end;
    if (token->single_word && !StandsAlone(text, begin, end)) continue;
    if (token->lstrip) {
      while (begin > done && IsSpace(Utf8CodePoint(text, PreviousCharacter(text, begin)))) {
        begin = PreviousCharacter(text, begin);
      }
    }
    if (token->rstrip) {
      while (end < text.size() && IsSpace(Utf8CodePoint(text, end))) {
        end += Utf8Length(text[end]);
      }
    }
    out.push_back({begin, end, token->id});
    done = end;
    offset = std::max(offset, end);
  }
  return out;
}

}  // namespace tandem::gateway
