#pragma once

// Turns a stream of token ids into text as soon as it is certain.
//
//   Detokenizer detokenizer(tokenizer, {.skip_special = true});
//   std::string text;
//   detokenizer.Append(id, &text);  // any number of times; may append nothing
//   detokenizer.Flush(&text);       // at the end of the stream, whatever ended it
//
// Text given out is always valid UTF-8. An incomplete sequence at the end is held back (at most 3
// bytes); an invalid one becomes one U+FFFD per maximal invalid subpart, and so does what is still
// incomplete at Flush. The concatenation of everything equals Tokenizer::Decode of all ids.
//
// Thread safety: one owner. The tokenizer must outlive it.

#include <string>
#include <string_view>

#include "gateway/text/tokenizer.h"

namespace tandem::gateway {

// The same for bytes: appends the certain text of held bytes + `bytes` to `out`.
class Utf8Stream {
 public:
  void Append(std::string_view bytes, std::string* out);
  void Flush(std::string* out);
  bool empty() const { return held_.empty(); }

 private:
  std::string held_;  // a proper prefix of a valid UTF-8 sequence
};

class Detokenizer {
 public:
  Detokenizer(const Tokenizer* tokenizer, DecodeOptions options)
      : tokenizer_(tokenizer), options_(options) {}

  void Append(TokenId id, std::string* out);
  void Flush(std::string* out) { stream_.Flush(out); }

  // The raw bytes of a token, for the `bytes` field of logprobs: never replaced, never held back.
  std::string_view TokenBytes(TokenId id) const { return tokenizer_->TokenBytes(id); }

 private:
  const Tokenizer* tokenizer_;
  DecodeOptions options_;
  Utf8Stream stream_;
};

}  // namespace tandem::gateway
