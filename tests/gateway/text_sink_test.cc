// Streamed text against the text as a whole, with the shipped model's tokenizer.

#include "gateway/text_sink.h"

#include <gtest/gtest.h>

#include <random>

#include "gateway/text/tokenizer.h"
#include "tests/testing/shared_data.h"

namespace tandem::gateway {
namespace {

class TextSinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = Tokenizer::Load(testing::SourceRoot() / "deploy" / "models" / "tandem-tiny");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = std::move(*tokenizer);
    factory_ = MakeTextSinkFactory(tokenizer_.get());
  }

  std::vector<TokenId> RandomTokens(uint64_t seed, size_t count) {
    std::mt19937_64 rng(seed);
    std::vector<TokenId> ids(count);
    for (TokenId& id : ids) id = static_cast<TokenId>(rng() % tokenizer_->vocab_size());
    return ids;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  TextSinkFactory factory_;
};

TEST_F(TextSinkTest, StreamedTextIsTheWholeText) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const auto ids = RandomTokens(seed, 60);
    GenerationRequest request;
    request.skip_special_tokens = seed % 2 == 0;
    request.stopping.stop_strings = {"\x01 never \x02"};
    const auto sink = factory_(request);
    std::string text;
    for (const TokenId id : ids) ASSERT_FALSE(sink->Append(id, seed % 3 != 0, &text));
    sink->Flush(&text);
    EXPECT_EQ(text, tokenizer_->Decode(ids, {.skip_special = request.skip_special_tokens}))
        << "seed " << seed;
    EXPECT_FALSE(sink->matched());
  }
}

TEST_F(TextSinkTest, TheTextEndsBeforeTheFirstStopString) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const auto ids = RandomTokens(seed, 60);
    const std::string whole = tokenizer_->Decode(ids, {.skip_special = true});
    // A piece of the text, from a whole character on.
    size_t begin = whole.size() / 2;
    while (begin > 0 && (whole[begin] & 0xc0) == 0x80) --begin;
    size_t end = std::min(begin + 5, whole.size());
    while (end < whole.size() && (whole[end] & 0xc0) == 0x80) ++end;
    GenerationRequest request;
    request.stopping.stop_strings = {whole.substr(begin, end - begin)};
    const auto sink = factory_(request);
    std::string text;
    bool stopped = false;
    for (size_t i = 0; i < ids.size() && !stopped; ++i) {
      stopped = sink->Append(ids[i], true, &text);
    }
    if (!stopped) sink->Flush(&text);
    ASSERT_EQ(sink->matched(), request.stopping.stop_strings[0]) << "seed " << seed;
    EXPECT_EQ(text, whole.substr(0, whole.find(request.stopping.stop_strings[0])));
  }
}

TEST(TextSink, AModelWithoutTokenizerHasNone) { EXPECT_FALSE(MakeTextSinkFactory(nullptr)); }

}  // namespace
}  // namespace tandem::gateway
