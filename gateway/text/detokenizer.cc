#include "gateway/text/detokenizer.h"

#include "gateway/text/utf8.h"

namespace tandem::gateway {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

enum class SequenceState { kComplete, kIncomplete, kInvalid };

// Judges the sequence that begins text; `*size` is its length: the whole character's, what there is
// of it, or the maximal subpart that could have begun a character (at least 1). [Unicode standard,
// section 3.9, table 3-7 and "U+FFFD substitution of maximal subparts"]
SequenceState Classify(std::string_view text, size_t* size) {
  const auto lead = static_cast<unsigned char>(text[0]);
  *size = 1;
  if (lead < 0x80) return SequenceState::kComplete;
  if (lead < 0xC2 || lead > 0xF4) return SequenceState::kInvalid;
  const size_t length = Utf8Length(text[0]);
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (; *size < length; ++*size) {
    if (*size == text.size()) return SequenceState::kIncomplete;
    const auto byte = static_cast<unsigned char>(text[*size]);
    if (byte < low || byte > high) return SequenceState::kInvalid;
    low = 0x80;
    high = 0xBF;
  }
  return SequenceState::kComplete;
}

}  // namespace

void Utf8Stream::Append(std::string_view bytes, std::string* out) {
  std::string joined;
  if (!held_.empty()) {
    joined = held_.append(bytes);
    bytes = joined;
    held_.clear();
  }
  size_t plain = 0;  // bytes[plain, offset) is valid and not given out yet
  size_t offset = 0;
  while (offset < bytes.size()) {
    size_t size = 0;
    const SequenceState state = Classify(bytes.substr(offset), &size);
    if (state != SequenceState::kComplete) {
      out->append(bytes.substr(plain, offset - plain));
      if (state == SequenceState::kIncomplete) {
        held_.assign(bytes.substr(offset));
        return;
      }
      out->append(kReplacement);
      plain = offset + size;
    }
    offset += size;
  }
  out->append(bytes.substr(plain));
}

void Utf8Stream::Flush(std::string* out) {
  if (!held_.empty()) out->append(kReplacement);
  held_.clear();
}

void Detokenizer::Append(TokenId id, std::string* out) {
  if (options_.skip_special && tokenizer_->IsSpecial(id)) return;
  stream_.Append(tokenizer_->TokenBytes(id), out);
}

}  // namespace tandem::gateway
