#pragma once

// Text from an untrusted file, made safe for one line of an error message: quoted, escaped, cut.

#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace tandem {

inline std::string QuoteForMessage(std::string_view text) {
  constexpr size_t kMaxShown = 160;
  const std::string shown(text.substr(0, kMaxShown));
  return absl::StrCat("'", absl::CHexEscape(shown), text.size() > kMaxShown ? "...'" : "'");
}

}  // namespace tandem
