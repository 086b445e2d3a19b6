#pragma once

// Keeps text that comes with a request from spelling control tokens in a chat prompt.
//
// Mark() puts a sentinel character inside every spelling of an added token; after rendering, the
// sentinels' places become PromptText::breaks. A token may also be put together from several
// strings, or from a string and the template around it, so the ends of a string that could be a
// part of one are marked too. Sentinels stand after the first or before the last character of a
// spelling, where they disturb a template's own string functions (trim, split, startswith) least.
//
// An assistant's message is the model's own earlier output: its plain tags (<think>, </tool_call>)
// stay tokens, and templates look for them. What marks turns (<|im_end|>) never does.
// Tokens that are only blanks (indentation in some vocabularies) are no control tokens.
//
// Thread safety: immutable. Input: valid UTF-8.

#include <string>
#include <string_view>
#include <vector>

#include "gateway/text/added_token_matcher.h"

namespace tandem::gateway {

class ContentGuard {
 public:
  enum class Author { kClient, kAssistant };

  explicit ContentGuard(const std::vector<AddedToken>& tokens);

  std::string Mark(std::string_view text, Author author, std::string_view sentinel) const;

 private:
  struct Table {
    explicit Table(std::vector<AddedToken> tokens);
    void FindMarks(std::string_view text, std::vector<size_t>* marks) const;

    AddedTokenMatcher matcher;
    std::vector<std::string> spellings;           // sorted
    std::vector<std::string> reversed_spellings;  // sorted
    size_t longest = 0;                           // bytes
  };

  Table client_;
  Table assistant_;
};

}  // namespace tandem::gateway
