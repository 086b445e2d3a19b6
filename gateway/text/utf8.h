#pragma once

// Small UTF-8 steps over text that is known to be valid. REQUIRES everywhere: valid UTF-8 and an
// offset at a character's first byte.

#include <cstddef>
#include <string_view>

namespace tandem::gateway {

// Bytes of the character that `lead` begins.
inline size_t Utf8Length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

inline char32_t Utf8CodePoint(std::string_view text, size_t offset) {
  const auto at = [&](size_t i) -> char32_t {
    return static_cast<unsigned char>(text[offset + i]);
  };
  switch (Utf8Length(text[offset])) {
    case 1:
      return at(0);
    case 2:
      return (at(0) & 0x1F) << 6 | (at(1) & 0x3F);
    case 3:
      return (at(0) & 0x0F) << 12 | (at(1) & 0x3F) << 6 | (at(2) & 0x3F);
    default:
      return (at(0) & 0x07) << 18 | (at(1) & 0x3F) << 12 | (at(2) & 0x3F) << 6 | (at(3) & 0x3F);
  }
}

}  // namespace tandem::gateway
