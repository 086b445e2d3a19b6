#include "common/base/shares.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/str_cat.h"

namespace tandem {

absl::StatusOr<std::vector<uint32_t>> ParseShares(const std::vector<std::string>& texts,
                                                  size_t workers, std::string_view option) {
  const std::string name(option);
  if (texts.empty()) return std::vector<uint32_t>(workers, 1);
  if (texts.size() != workers) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " names ", texts.size(), " workers, but there are ", workers));
  }
  std::vector<uint32_t> shares;
  for (const std::string& text : texts) {
    uint32_t share = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), share);
    if (error != std::errc() || end != text.data() + text.size() || share > 1'000'000) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": \"", text, "\" is no share (0 to 1000000)"));
    }
    shares.push_back(share);
  }
  if (std::all_of(shares.begin(), shares.end(), [](uint32_t share) { return share == 0; })) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": at least one share must not be 0"));
  }
  return shares;
}

}  // namespace tandem
