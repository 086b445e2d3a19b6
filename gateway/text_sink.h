#pragma once

// The engine's view of text: tokens of one request go in, certain text comes out, stop strings are
// found. A seam, so that the engine is tested without a tokenizer and serves models that have none.
//
// Thread safety: a sink has one owner (the engine thread); a factory may be called from any thread.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "gateway/engine.h"

namespace tandem::gateway {

class Tokenizer;

class TextSink {
 public:
  virtual ~TextSink() = default;
  // Appends to `out` what is certain now. Returns true when a stop string ended the text; what
  // follows is ignored from then on. `may_stop` is false while min_tokens forbids a stop.
  virtual bool Append(uint32_t token_id, bool may_stop, std::string* out) = 0;
  // The stream ends without a stop string: appends what was held back.
  virtual void Flush(std::string* out) = 0;
  // The stop string that was found.
  virtual std::optional<std::string> matched() const = 0;
};

// Makes the sink of one request. An empty function: the model has no tokenizer, events carry token
// ids only, and requests with stop strings are refused.
using TextSinkFactory = std::function<std::unique_ptr<TextSink>(const GenerationRequest&)>;

// Sinks over `tokenizer`, which must outlive them; an empty function if it is null.
TextSinkFactory MakeTextSinkFactory(const Tokenizer* tokenizer);

}  // namespace tandem::gateway
