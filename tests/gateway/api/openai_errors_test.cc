// What the OpenAI front end refuses, and how it says so.

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "tests/gateway/api/api_fixture.h"

namespace tandem::gateway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Document = nlohmann::json;

struct BadField {
  const char* json;
  const char* param;
};

// Whether the request is refused with 400, streamed or not, on both endpoints where both have it.
#define EXPECT_REFUSED(response, expected_param)                        \
  do {                                                                  \
    const ClientResponse answer = (response);                           \
    EXPECT_EQ(answer.status, 400) << answer.body;                       \
    EXPECT_EQ(answer.ErrorParam(), (expected_param)) << answer.body;    \
    EXPECT_EQ(answer.Json()["error"]["type"], "invalid_request_error"); \
  } while (false)

TEST_F(ApiTest, BadFieldsAreRefusedByName) {
  const BadField cases[] = {
      {R"(,"temperature":-0.1)", "temperature"},
      {R"(,"temperature":"hot")", "temperature"},
      {R"(,"top_p":1.5)", "top_p"},
      {R"(,"top_k":-2)", "top_k"},
      {R"(,"top_k":1.5)", "top_k"},
      {R"(,"min_p":2)", "min_p"},
      {R"(,"presence_penalty":2.5)", "presence_penalty"},
      {R"(,"frequency_penalty":-3)", "frequency_penalty"},
      {R"(,"repetition_penalty":0)", "repetition_penalty"},
      {R"(,"n":0)", "n"},
      {R"(,"n":100000)", "n"},
      {R"(,"max_tokens":-1)", "max_tokens"},
      {R"(,"max_tokens":10,"min_tokens":11)", "min_tokens"},
      {R"(,"stop":[1])", "stop"},
      {R"(,"stop_token_ids":[1024])", "stop_token_ids"},
      {R"(,"logit_bias":{"x":1})", "logit_bias"},
      {R"(,"logit_bias":{"1":101})", "logit_bias"},
      {R"(,"logit_bias":[])", "logit_bias"},
      {R"(,"stream":"yes")", "stream"},
      {R"(,"stream_options":{"include_usage":1})", "stream_options.include_usage"},
      {R"(,"response_format":{"type":"json_schema"})", "response_format"},
      {R"(,"guided_regex":"a+")", "guided_regex"},
  };
  for (const BadField& bad : cases) {
    SCOPED_TRACE(bad.json);
    EXPECT_REFUSED(PostChat(Chat(bad.json)), bad.param);
    EXPECT_REFUSED(PostCompletion(Completion(bad.json)), bad.param);
  }
  EXPECT_TRUE(engine_.requests().empty());
}

TEST_F(ApiTest, BadChatFieldsAreRefusedByName) {
  const BadField cases[] = {
      {R"({"model":"tiny"})", "messages"},
      {R"({"messages":[]})", "messages"},
      {R"({"messages":[{"content":"x"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"robot","content":"x"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"user"}]})", "messages[0].content"},
      {R"({"messages":[{"role":"user","content":5}]})", "messages[0].content"},
      {R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]})",
       "messages[0].content[0].type"},
      {R"({"messages":[{"role":"user","content":"x"}],"top_logprobs":2})", "top_logprobs"},
      {R"({"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":21})",
       "top_logprobs"},
      {R"({"messages":[{"role":"user","content":"x"}],"max_completion_tokens":0})",
       "max_completion_tokens"},
      {R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]})", "tools"},
      {R"({"messages":[{"role":"user","content":"x"}],"tool_choice":"required"})", "tool_choice"},
      {R"({"messages":[{"role":"user","content":"x"}],"continue_final_message":true})",
       "continue_final_message"},
  };
  for (const BadField& bad : cases) {
    SCOPED_TRACE(bad.json);
    EXPECT_REFUSED(PostChat(bad.json), bad.param);
  }
}

// SP-1: a token id beyond the vocabulary in logit_bias.
TEST_F(ApiTest, Sp1LogitBiasBeyondTheVocabulary) {
  EXPECT_REFUSED(PostChat(Chat(R"(,"logit_bias":{"9999999":5})")), "logit_bias");
  EXPECT_REFUSED(PostChat(Chat(R"(,"logit_bias":{"1024":5})")), "logit_bias");
  EXPECT_EQ(PostChat(Chat(R"(,"logit_bias":{"1023":5})")).status, 200);
}

// SP-3: seeds beyond 64 bits.
TEST_F(ApiTest, Sp3SeedsBeyond64Bits) {
  EXPECT_REFUSED(PostChat(Chat(R"(,"seed":18446744073709551616)")), "seed");
  EXPECT_REFUSED(PostChat(Chat(R"(,"seed":-9223372036854775809)")), "seed");
  EXPECT_EQ(PostChat(Chat(R"(,"seed":-9223372036854775808)")).status, 200);
  EXPECT_EQ(PostChat(Chat(R"(,"seed":9223372036854775807)")).status, 200);
}

// SP-7: an empty stop string is refused; an empty list and null are absent.
TEST_F(ApiTest, Sp7EmptyStopStrings) {
  EXPECT_REFUSED(PostChat(Chat(R"(,"stop":"")")), "stop");
  EXPECT_REFUSED(PostChat(Chat(R"(,"stop":[""])")), "stop");
  EXPECT_EQ(PostChat(Chat(R"(,"stop":[])")).Json()["choices"][0]["message"]["content"],
            "Hello world");
  EXPECT_EQ(PostChat(Chat(R"(,"stop":null)")).Json()["choices"][0]["message"]["content"],
            "Hello world");
}

// SP-9: an empty prompt.
TEST_F(ApiTest, Sp9EmptyPrompt) {
  EXPECT_REFUSED(PostCompletion(R"({"prompt":""})"), "prompt");
  EXPECT_REFUSED(PostCompletion(R"({"prompt":[]})"), "prompt");
  EXPECT_REFUSED(PostCompletion(R"({"prompt":[[]]})"), "prompt");
  EXPECT_EQ(PostChat(R"({"messages":[{"role":"user","content":""}]})").status, 200);
}

// SO-11: what frameworks send by default counts as absent.
TEST_F(ApiTest, So11EmptyToolsAndNullsAreAbsent) {
  for (const char* fields :
       {R"(,"tools":[])", R"(,"tools":[],"tool_choice":null)",
        R"(,"tools":[],"tool_choice":"auto")", R"(,"tools":[],"tool_choice":"none")",
        R"(,"tools":null)", R"(,"stop":null)", R"(,"stream_options":null)", R"(,"functions":null)",
        R"(,"temperature":null)", R"(,"response_format":{"type":"text"})",
        R"(,"nonsense":{"a":[1]})"}) {
    EXPECT_EQ(PostChat(Chat(fields)).status, 200) << fields;
  }
}

// HC-1: an unpaired surrogate escape, and bytes that are not UTF-8.
TEST_F(ApiTest, Hc1UnpairedSurrogateNamesItsField) {
  for (const char* stream : {"false", "true"}) {
    const std::string chat = absl::StrCat(R"({"model":"tandem","stream":)", stream,
                                          R"(,"messages":[{"role":"user","content":"x \ud83d"}]})");
    EXPECT_REFUSED(PostChat(chat), "messages[0].content");
    EXPECT_REFUSED(
        PostCompletion(absl::StrCat(R"({"stream":)", stream, R"(,"prompt":"x \ud83d"})")),
        "prompt");
    EXPECT_REFUSED(PostCompletion(absl::StrCat(R"({"stream":)", stream, ",\"prompt\":\"x \xff\"}")),
                   "prompt");
  }
  EXPECT_EQ(
      Post(port(), "/v1/messages", R"({"messages":[{"role":"user","content":"x \ud83d"}]})").status,
      400);
}

TEST_F(ApiTest, BrokenBodiesAreRefused) {
  for (const char* body : {"", "{", "[]", "{\"a\":1", "{\"a\":01}", "{\"a\":1e999}", "nul"}) {
    const ClientResponse response = PostChat(body);
    EXPECT_EQ(response.status, 400) << body;
    EXPECT_EQ(response.Json()["error"]["type"], "invalid_request_error") << response.body;
  }
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_EQ(PostChat(absl::StrCat("{\"a\":", deep, "}")).status, 400);
}

TEST_F(ApiTest, PromptOverTheContextGivesBothCountsAndTheLimit) {
  const ClientResponse response = PostCompletion(R"({"prompt":[1,2,3],"max_tokens":1022})");
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(response.ErrorCode(), "context_length_exceeded");
  for (const char* number : {"1024", "3 tokens", "1022"}) {
    EXPECT_THAT(response.body, HasSubstr(number));
  }
  std::string ids = "1";
  for (int i = 0; i < 1500; ++i) ids += ",1";
  EXPECT_EQ(PostCompletion(absl::StrCat(R"({"prompt":[)", ids, "]}")).ErrorCode(),
            "context_length_exceeded");
}

TEST_F(ApiTest, UnknownModelPathAndMethod) {
  const ClientResponse model =
      PostChat(R"({"model":"gpt","messages":[{"role":"user","content":""}]})");
  EXPECT_EQ(model.status, 404);
  EXPECT_EQ(model.ErrorCode(), "model_not_found");
  EXPECT_EQ(Get(port(), "/nowhere").status, 404);
  const ClientResponse method = Get(port(), kChatPath);
  EXPECT_EQ(method.status, 405);
  EXPECT_EQ(method.Header("allow"), "POST, OPTIONS");
  EXPECT_EQ(Post(port(), "/v1/embeddings", "{}").status, 404);
  EXPECT_EQ(Post(port(), "/v1/responses", "{}").status, 404);
}

TEST_F(ApiTest, EngineErrorsKeepTheirMeaning) {
  engine_.SetScript({.refuse = absl::ResourceExhaustedError("the queue is full")});
  const ClientResponse full = PostChat(Chat());
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.Header("retry-after"), "1");
  EXPECT_EQ(full.ErrorCode(), "queue_full");
  engine_.SetScript({.refuse = absl::UnavailableError("draining")});
  EXPECT_EQ(PostChat(Chat(R"(,"stream":true)")).status, 503);
  engine_.SetScript({.refuse = absl::InternalError("secret detail")});
  const ClientResponse internal = PostChat(Chat());
  EXPECT_EQ(internal.status, 500);
  EXPECT_THAT(internal.body, Not(HasSubstr("secret")));
}

TEST_F(ApiTest, ErrorInAStreamIsOneObjectAndTheEnd) {
  engine_.SetScript({.texts = {"a"},
                     .reason = FinishReason::kError,
                     .error = absl::UnavailableError("the worker was lost")});
  HttpClient client(port());
  client.Send(PostText(kChatPath, Chat(R"(,"stream":true)")));
  const ClientResponse response = client.Read();
  EXPECT_EQ(response.status, 200);
  const std::vector<std::string> data = SseData(response.body);
  ASSERT_FALSE(data.empty());
  const Document last = Document::parse(data.back());
  EXPECT_EQ(last["error"]["message"], "the worker was lost");
  EXPECT_THAT(response.body, Not(HasSubstr("[DONE]")));
  EXPECT_TRUE(client.ReadToEnd());
  // The same failure before any byte is a status.
  EXPECT_EQ(PostChat(Chat()).status, 503);
}

TEST_F(ApiTest, RequestIdIsEchoedOrMade) {
  const ClientResponse mine = Post(port(), kChatPath, Chat(), "X-Request-Id: my-id-1\r\n");
  EXPECT_EQ(mine.Header("x-request-id"), "my-id-1");
  EXPECT_EQ(engine_.requests()[0].request_id, "my-id-1");
  const ClientResponse bad = Post(port(), kChatPath, "{", "X-Request-Id: my-id-2\r\n");
  EXPECT_EQ(bad.Json()["error"]["request_id"], "my-id-2");
  EXPECT_FALSE(PostChat(Chat()).Header("x-request-id").empty());
  EXPECT_NE(Post(port(), kChatPath, Chat(), "X-Request-Id: a b\r\n").Header("x-request-id"), "a b");
}

TEST_F(ApiTest, KeysAreRequiredEverywhereButForHealth) {
  Setup setup;
  setup.keys = {"first", "second"};
  Start(setup);
  for (const char* path : {"/v1/models", "/nowhere", "/v1/chat/completions", "/tokenize"}) {
    const ClientResponse response = Get(port(), path);
    EXPECT_EQ(response.status, 401) << path;
    EXPECT_EQ(response.Json()["error"]["type"], "authentication_error");
  }
  EXPECT_EQ(Get(port(), "/health/live").status, 200);
  EXPECT_EQ(Get(port(), "/health/ready").status, 200);
  EXPECT_EQ(Get(port(), "/v1/models", "Authorization: Bearer wrong\r\n").status, 401);
  EXPECT_EQ(Get(port(), "/v1/models", "Authorization: Bearer second\r\n").status, 200);
  EXPECT_EQ(Get(port(), "/v1/models", "authorization: bearer first\r\n").status, 200);
  EXPECT_EQ(Get(port(), "/v1/models", "X-Api-Key: first\r\n").status, 200);
  Post(port(), kChatPath, Chat(), "Authorization: Bearer first\r\n");
  Post(port(), kChatPath, Chat(), "Authorization: Bearer second\r\n");
  const auto requests = engine_.requests();
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_NE(requests[0].tenant, requests[1].tenant);
  EXPECT_FALSE(requests[0].tenant.empty());
}

}  // namespace
}  // namespace tandem::gateway
