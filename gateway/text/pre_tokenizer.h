#pragma once

// Cuts text into the words within which BPE merges, as the pre_tokenizer of a tokenizer.json says.
//
// Thread safety: immutable; Words and Regex::Scratch have one owner.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gateway/text/regex.h"
#include "gateway/text/tokenizer_spec.h"

namespace tandem::gateway {

struct WordSpan {
  size_t begin = 0;
  size_t end = 0;
};

// Words as spans of a text, which steps may replace (a prefix space makes it longer).
struct Words {
  std::string text;
  std::vector<WordSpan> spans;
};

class PreTokenizer {
 public:
  // `source` names the file in errors.
  static absl::StatusOr<PreTokenizer> Build(const std::vector<PreTokenizerStep>& steps,
                                            std::string_view source);

  // REQUIRES: `words` holds the text and one span over all of it.
  absl::Status Split(Words* words, Regex::Scratch* scratch) const;

 private:
  struct Step {
    std::optional<Regex> regex;  // none: put a space before words that have none
    SplitBehavior behavior;
    bool invert;
  };
  std::vector<Step> steps_;
};

}  // namespace tandem::gateway
