#pragma once

// A prompt before tokenization: its exact text, and where control tokens may not be recognised.
//
// A chat prompt mixes the template's own text (which spells control tokens on purpose) with text of
// messages and tools (which must not be able to forge them). `breaks` are byte offsets into `text`;
// an added token whose spelling spans a break is ordinary text. Plain prompts have no breaks.

#include <cstddef>
#include <string>
#include <vector>

namespace tandem::gateway {

struct PromptText {
  std::string text;
  std::vector<size_t> breaks;  // ascending, 0 < offset < text.size()
};

}  // namespace tandem::gateway
