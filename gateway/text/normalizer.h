#pragma once

// The Unicode normalization forms that a tokenizer.json can ask for, applied in order. The text
// that nearly all prompts consist of is recognised as normalized already and is not copied.
//
// Linear in the text's size but for the sorting of combining marks (O(n log n); a library's usual
// insertion sort is quadratic on a run of marks, which a client can send).
//
// Thread safety: immutable. Input: valid UTF-8.

#include <string>
#include <string_view>
#include <vector>

#include "gateway/text/prompt_text.h"
#include "gateway/text/tokenizer_spec.h"

namespace tandem::gateway {

class Normalizer {
 public:
  explicit Normalizer(std::vector<UnicodeForm> forms) : forms_(std::move(forms)) {}

  // True if Apply would return `text` itself; false may also mean "not known".
  bool IsNormalized(std::string_view text) const;
  std::string Apply(std::string_view text) const;
  // Normalizes what lies between breaks piece by piece, and moves the breaks along.
  PromptText Apply(const PromptText& text) const;

 private:
  std::vector<UnicodeForm> forms_;
};

}  // namespace tandem::gateway
