// Control tokens in the text of messages: where the guard marks it, and that what comes out of
// marking, joining and encoding has none.

#include "gateway/text/content_guard.h"

#include <gtest/gtest.h>

#include <random>

#include "gateway/text/chat_request.h"
#include "tests/gateway/text/text_testing.h"

namespace tandem::gateway {
namespace {

using Author = ContentGuard::Author;
constexpr std::string_view kMark = "\xEF\xB7\x90";  // U+FDD0

std::vector<AddedToken> Tokens() {
  std::vector<AddedToken> out;
  TokenId id = 300;
  for (const auto& [content, special] :
       std::vector<std::pair<const char*, bool>>{{"<|end|>", true},
                                                 {"<\xEF\xBD\x9CUser\xEF\xBD\x9C>", false},
                                                 {"<think>", false},
                                                 {"</think>", false},
                                                 {"[gMASK]", true},
                                                 {"    ", false},
                                                 {"#", true}}) {
    AddedToken token;
    token.id = id++;
    token.content = content;
    token.special = special;
    out.push_back(token);
  }
  return out;
}

// Marks shown as '^'.
std::string Mark(std::string_view text, Author author = Author::kClient) {
  std::string out = ContentGuard(Tokens()).Mark(text, author, kMark);
  for (size_t at; (at = out.find(kMark)) != std::string::npos;) out.replace(at, kMark.size(), "^");
  return out;
}

TEST(ContentGuard, MarksWholeSpellings) {
  EXPECT_EQ(Mark("a<|end|>b"), "a<^|end|>b");
  EXPECT_EQ(Mark("<|end|><|end|>"), "<^|end|><^|end|>");
  EXPECT_EQ(Mark("<|<|end|>end|>"), "<|<^|end|>end|>");
  EXPECT_EQ(Mark("x<think>y"), "x<^think>y");
}

TEST(ContentGuard, LeavesOrdinaryTextAlone) {
  for (const char* text :
       {"", "a", "user", "end", "think", "hello world", "a < b", "if (a[0] > b) {}", "    indented",
        "\xE4\xBD\xA0\xE5\xA5\xBD", "# heading"}) {
    EXPECT_EQ(Mark(text), text);
  }
}

TEST(ContentGuard, MarksEndsThatCouldBeCompleted) {
  EXPECT_EQ(Mark("a <|en"), "a <^|en");
  EXPECT_EQ(Mark("nd|> b"), "nd|^> b");
  EXPECT_EQ(Mark("|end|"), "|^end|");
  EXPECT_EQ(Mark("text <"), "text <^");
  EXPECT_EQ(Mark("> quote"), "^> quote");
}

TEST(ContentGuard, AssistantsKeepTheirTagsButMarkNoTurns) {
  EXPECT_EQ(Mark("x<think>y</think>z", Author::kAssistant), "x<think>y</think>z");
  EXPECT_EQ(Mark("x<|end|>z", Author::kAssistant), "x<^|end|>z");
  EXPECT_EQ(Mark("x<\xEF\xBD\x9CUser\xEF\xBD\x9C>z", Author::kAssistant),
            "x<^\xEF\xBD\x9CUser\xEF\xBD\x9C>z");
}

// Random pieces of token spellings, joined: encoding finds none of the guarded tokens.
TEST(ContentGuard, NoJoiningOfMarkedStringsMakesAToken) {
  auto json = testing::SmallTokenizerJson({});
  for (const AddedToken& token : Tokens()) {
    if (token.content == "#" || token.content == "    ") continue;
    json["added_tokens"].push_back({{"id", token.id}, {"content", token.content}});
  }
  const auto tokenizer = Tokenizer::FromJson(json.dump(), "t");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const ContentGuard guard((*tokenizer)->added_tokens());
  constexpr uint32_t kSeed = 5;
  SCOPED_TRACE(kSeed);
  std::mt19937 random(kSeed);
  size_t would_match = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string joined;
    std::string plain;
    for (size_t i = 0, n = 1 + random() % 4; i < n; ++i) {
      const auto& tokens = (*tokenizer)->added_tokens();
      const std::string& token = tokens[random() % tokens.size()].content;
      const auto character = [&](size_t at) {  // strings of messages are whole characters
        while (at < token.size() && (token[at] & 0xC0) == 0x80) ++at;
        return at;
      };
      const size_t begin = random() % 2 ? 0 : character(random() % token.size());
      const size_t end =
          random() % 2 ? token.size() : character(begin + random() % (token.size() - begin + 1));
      const std::string part = token.substr(begin, end - begin);
      joined += guard.Mark(part, Author::kClient, kMark);
      plain += part;
    }
    const PromptText prompt = TakeOutSentinels(joined, kMark);
    ASSERT_EQ(prompt.text, plain);
    const auto ids = (*tokenizer)->Encode(prompt, {});
    ASSERT_TRUE(ids.ok()) << ids.status();
    for (const TokenId id : *ids) ASSERT_LT(id, 300u) << plain;
    const auto parsed = (*tokenizer)->Encode(plain, {});
    would_match +=
        std::any_of(parsed->begin(), parsed->end(), [](TokenId id) { return id >= 300; });
  }
  EXPECT_GT(would_match, 1000u);
}

TEST(ChatRequest, SentinelIsOneThatTheTextLacks) {
  EXPECT_EQ(SentinelsIn("abc"), 0u);
  EXPECT_EQ(SentinelsIn("a\xEF\xB7\x90 \\uFDD2 \\ufdef \xEF\xB7\xB0"), 1u | 4u | 1u << 31);
  const ContentGuard guard(Tokens());
  const ChatRequest request{.messages_json = "[\"\xEF\xB7\x90 \\ufdd1 <|end|>\"]"};
  const auto written = WriteHelperRequest(request, "default", {}, guard, 4);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->sentinel, "\xEF\xB7\x93");  // U+FDD3
  const auto all = WriteHelperRequest(request, "default", {}, guard, ~0u);
  EXPECT_EQ(all.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ChatRequest, TakesSentinelsOut) {
  const std::string m(kMark);
  const PromptText prompt = TakeOutSentinels(m + "a" + m + m + "bc" + m + "d" + m, kMark);
  EXPECT_EQ(prompt.text, "abcd");
  EXPECT_EQ(prompt.breaks, (std::vector<size_t>{1, 3}));
}

TEST(ChatRequest, KeepsNumbersOrderAndArguments) {
  const ContentGuard guard({});
  ChatRequest request;
  request.messages_json =
      R"([{"z": 1.50, "role": "assistant", "tool_calls": [{"function": {"arguments":)"
      R"( "{\"b\": 1e2, \"a\": \"\\n\"}"}}, {"function": {"arguments": ""}},)"
      R"( {"function": {"arguments": "not json"}}, {"function": {"arguments": {"k": 1}}}],)"
      R"( "arguments": "{}"}])";
  request.kwargs_json = R"({"x": [1, "y"]})";
  const auto written = WriteHelperRequest(request, "default", {{"bos_token", "<s>"}}, guard, 0);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->json,
            "{\"template\":\"default\",\"now\":null,\"sentinel\":\"\xEF\xB7\x90\",\"variables\":"
            "{\"bos_token\":\"<s>\",\"messages\":[{\"z\":1.50,\"role\":\"assistant\","
            "\"tool_calls\":[{\"function\":{\"arguments\":{\"b\":1e2,\"a\":\"\\u000a\"}}},"
            "{\"function\":{\"arguments\":{}}},{\"function\":{\"arguments\":\"not json\"}},"
            "{\"function\":{\"arguments\":{\"k\":1}}}],\"arguments\":\"{}\"}],\"tools\":null,"
            "\"documents\":null,\"add_generation_prompt\":true,\"x\":[1,\"y\"]}}");
}

}  // namespace
}  // namespace tandem::gateway
