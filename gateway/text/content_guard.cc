#include "gateway/text/content_guard.h"

#include <algorithm>

#include "gateway/text/utf8.h"

namespace tandem::gateway {
namespace {

bool IsWordByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-' || c == ' ';
}

bool IsBlank(char c) { return c == ' ' || (c >= 9 && c <= 13); }

// Ordinary words occur inside control tokens ("user", "think") without meaning them.
bool IsPlainWord(std::string_view text) {
  return std::all_of(text.begin(), text.end(), IsWordByte);
}

// <name> or </name>, as models write around reasoning and tool calls.
bool IsPlainTag(std::string_view text) {
  if (text.size() < 3 || text.front() != '<' || text.back() != '>') return false;
  text = text.substr(1, text.size() - 2);
  if (text.front() == '/') text.remove_prefix(1);
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](char c) { return IsWordByte(c) || c == ':' || c == '.'; });
}

std::vector<AddedToken> Guarded(const std::vector<AddedToken>& tokens,
                                ContentGuard::Author author) {
  std::vector<AddedToken> out;
  for (const AddedToken& token : tokens) {
    const std::string& text = token.content;
    // A single character has no inside to put a mark into.
    if (text.empty() || text.size() == Utf8Length(text[0])) continue;
    if (std::all_of(text.begin(), text.end(), IsBlank)) continue;
    if (author == ContentGuard::Author::kAssistant && !token.special && IsPlainTag(text)) continue;
    out.push_back(token);
  }
  return out;
}

// Whether some string is `prefix` and more.
bool AnyContinues(const std::vector<std::string>& sorted, std::string_view prefix) {
  const auto it = std::upper_bound(sorted.begin(), sorted.end(), prefix);
  return it != sorted.end() && std::string_view(*it).starts_with(prefix);
}

}  // namespace

ContentGuard::Table::Table(std::vector<AddedToken> tokens) : matcher(tokens) {
  for (const AddedToken& token : tokens) {
    spellings.push_back(token.content);
    reversed_spellings.emplace_back(token.content.rbegin(), token.content.rend());
    longest = std::max(longest, token.content.size());
  }
  std::sort(spellings.begin(), spellings.end());
  std::sort(reversed_spellings.begin(), reversed_spellings.end());
}

void ContentGuard::Table::FindMarks(std::string_view text, std::vector<size_t>* marks) const {
  const auto second_character = [&](size_t begin) { return begin + Utf8Length(text[begin]); };
  const auto last_character = [](std::string_view part) {
    size_t at = part.size() - 1;
    while (at > 0 && (part[at] & 0xC0) == 0x80) --at;
    return at;
  };
  // Whole spellings, also those that overlap.
  for (size_t i = 0; i < text.size(); ++i) {
    if (matcher.LongestAt(text, i) != nullptr) marks->push_back(second_character(i));
  }
  // An end that begins a token.
  for (size_t i = text.size() - std::min(text.size(), longest); i < text.size(); ++i) {
    if ((text[i] & 0xC0) == 0x80 || IsPlainWord(text.substr(i))) continue;
    if (AnyContinues(spellings, text.substr(i))) marks->push_back(second_character(i));
  }
  // A beginning that ends a token.
  const std::string head(text.rend() - static_cast<ptrdiff_t>(std::min(text.size(), longest)),
                         text.rend());  // reversed
  for (size_t size = 1; size <= head.size(); ++size) {
    if ((size < text.size() && (text[size] & 0xC0) == 0x80) || IsPlainWord(text.substr(0, size))) {
      continue;
    }
    if (AnyContinues(reversed_spellings, std::string_view(head).substr(head.size() - size))) {
      marks->push_back(last_character(text.substr(0, size)));
    }
  }
  // All of it from a token's inside.
  if (text.size() < longest && text.size() > Utf8Length(text[0]) && !IsPlainWord(text)) {
    for (const std::string& spelling : spellings) {
      if (spelling.size() > text.size() && spelling.find(text) != std::string::npos) {
        marks->push_back(second_character(0));
        break;
      }
    }
  }
}

ContentGuard::ContentGuard(const std::vector<AddedToken>& tokens)
    : client_(Guarded(tokens, Author::kClient)), assistant_(Guarded(tokens, Author::kAssistant)) {}

std::string ContentGuard::Mark(std::string_view text, Author author,
                               std::string_view sentinel) const {
  std::vector<size_t> marks;
  if (!text.empty()) {
    (author == Author::kAssistant ? assistant_ : client_).FindMarks(text, &marks);
  }
  std::sort(marks.begin(), marks.end());
  marks.erase(std::unique(marks.begin(), marks.end()), marks.end());
  std::string out;
  out.reserve(text.size() + marks.size() * sentinel.size());
  size_t done = 0;
  for (const size_t mark : marks) {
    out.append(text.substr(done, mark - done)).append(sentinel);
    done = mark;
  }
  return out.append(text.substr(done));
}

}  // namespace tandem::gateway
