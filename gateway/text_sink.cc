#include "gateway/text_sink.h"

#include <utility>

#include "gateway/text/detokenizer.h"
#include "gateway/text/stop_matcher.h"
#include "gateway/text/tokenizer.h"

namespace tandem::gateway {
namespace {

class TokenizerSink final : public TextSink {
 public:
  TokenizerSink(const Tokenizer* tokenizer, const GenerationRequest& request)
      : stops_(request.stopping.stop_strings),
        detokenizer_(tokenizer, {.skip_special = request.skip_special_tokens}),
        matcher_({.stops = stops_}) {}

  bool Append(uint32_t token_id, bool may_stop, std::string* out) override {
    if (matcher_.stopped()) return true;
    std::string text;
    detokenizer_.Append(token_id, &text);
    if (!may_stop) {
      // Nothing is held back yet: a stop string begins behind the last token that may not stop.
      out->append(text);
      return false;
    }
    return matcher_.Append(text, out);
  }

  void Flush(std::string* out) override {
    std::string text;
    detokenizer_.Flush(&text);
    // Replacement characters at the very end can complete a stop string as any text can.
    matcher_.Append(text, out);
    matcher_.Flush(out);
  }

  std::optional<std::string> matched() const override {
    if (!matcher_.matched()) return std::nullopt;
    return stops_[*matcher_.matched()];
  }

 private:
  const std::vector<std::string> stops_;
  Detokenizer detokenizer_;
  StopMatcher matcher_;
};

}  // namespace

TextSinkFactory MakeTextSinkFactory(const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return nullptr;
  return [tokenizer](const GenerationRequest& request) {
    return std::make_unique<TokenizerSink>(tokenizer, request);
  };
}

}  // namespace tandem::gateway
