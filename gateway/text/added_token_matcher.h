#pragma once

// Finds added tokens in text: leftmost first, the longest of those that begin at one place, not
// overlapping; with each token's rules about words and blanks beside it.
//
// Thread safety: immutable. Input: valid UTF-8. Cost: O(bytes + tokens' bytes tried), where a place
// whose first byte begins no token costs one table look-up.

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gateway/text/tokenizer.h"

namespace tandem::gateway {

class AddedTokenMatcher {
 public:
  struct Match {
    size_t begin = 0;
    size_t end = 0;
    TokenId id = 0;
  };

  // `tokens`: with the spelling to look for as content.
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }
  // `breaks`: ascending offsets that no match may span.
  std::vector<Match> Find(std::string_view text, std::span<const size_t> breaks) const;
  // The longest token that text begins with at `offset`; nullptr: none.
  const AddedToken* LongestAt(std::string_view text, size_t offset) const;

 private:
  std::vector<AddedToken> tokens_;  // sorted by content
  std::array<std::pair<uint32_t, uint32_t>, 256> by_first_byte_{};
};

}  // namespace tandem::gateway
