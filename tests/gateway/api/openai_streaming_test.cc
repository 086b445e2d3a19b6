// Clients that leave, wait or do not read.

#include <gmock/gmock.h>

#include <boost/asio/io_context.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "gateway/api/openai_call.h"
#include "tests/gateway/api/api_fixture.h"

namespace tandem::gateway {
namespace {

using ::testing::HasSubstr;

// Bounds a wait for what should happen at once.
constexpr std::chrono::milliseconds kSoon{10'000};

TEST_F(ApiTest, HeartbeatsKeepASilentStreamAlive) {
  Setup setup;
  setup.api.heartbeat = std::chrono::milliseconds(20);
  Start(setup);
  engine_.SetScript({.texts = {}, .hold = true});
  HttpClient client(port());
  client.Send(PostText(kChatPath, Chat(R"(,"stream":true)")));
  // The head and comments come while no token is there.
  ASSERT_TRUE(client.ReadUntil(": heartbeat\n\n"));
  EXPECT_THAT(client.received(), HasSubstr("200 OK"));
  engine_.Release();
  EXPECT_EQ(SseData(client.Read().body).back(), "[DONE]");
}

TEST_F(ApiTest, LeavingAStreamCancelsItsGeneration) {
  engine_.SetScript({.endless = true});
  HttpClient client(port());
  client.Send(PostText(kChatPath, Chat(R"(,"stream":true)")));
  ASSERT_TRUE(client.ReadUntil("Hello"));
  client.Close();
  EXPECT_TRUE(engine_.WaitUntilIdle(kSoon));
  EXPECT_EQ(engine_.cancels(), 1);
}

TEST_F(ApiTest, LeavingDuringASilentPrefillCancels) {
  for (const char* stream : {"true", "false"}) {
    engine_.SetScript({.texts = {}, .hold = true});
    const size_t before = engine_.requests().size();
    HttpClient client(port());
    client.Send(PostText(kChatPath, Chat(absl::StrCat(R"(,"n":2,"stream":)", stream))));
    ASSERT_TRUE(engine_.WaitForRequests(before + 2, kSoon));
    client.Reset();
    EXPECT_TRUE(engine_.WaitUntilIdle(kSoon)) << stream;
  }
  EXPECT_EQ(engine_.cancels(), 4);
}

TEST_F(ApiTest, APipelinedRequestIsNoDeparture) {
  engine_.SetScript({.hold = true});
  HttpClient client(port());
  client.Send(PostText(kChatPath, Chat()));
  ASSERT_TRUE(engine_.WaitForRequests(1, kSoon));
  client.Send(GetText("/health/live"));
  engine_.Release();
  EXPECT_EQ(client.Read().status, 200);
  EXPECT_EQ(client.Read().status, 200);
  EXPECT_EQ(engine_.cancels(), 0);
}

TEST_F(ApiTest, AClientThatDoesNotReadLosesItsStreamOnly) {
  Setup setup;
  setup.api.stream.max_buffered_bytes = 4096;
  setup.http.write_timeout = std::chrono::milliseconds(200);
  Start(setup);
  engine_.SetScript({.texts = {std::string(10'000, 'x')}, .endless = true});
  HttpClient slow(port());
  slow.Send(PostText(kChatPath, Chat(R"(,"stream":true)")));
  // It never reads: kernel buffers fill, then ours.
  EXPECT_TRUE(engine_.WaitForRequests(1, kSoon));
  EXPECT_TRUE(engine_.WaitUntilIdle(kSoon));
  engine_.SetScript({});
  EXPECT_EQ(PostChat(Chat()).status, 200);
}

TEST_F(ApiTest, StoppingTheServerEndsOpenStreams) {
  engine_.SetScript({.endless = true});
  HttpClient client(port());
  client.Send(PostText(kChatPath, Chat(R"(,"stream":true)")));
  ASSERT_TRUE(client.ReadUntil("Hello"));
  http_server_.reset();
  EXPECT_TRUE(engine_.WaitUntilIdle(kSoon));
}

// An engine thread may be the last to hold a stream's signal, after the server is gone.
TEST(StreamSignal, OutlivesItsServerOnceClosed) {
  auto io = std::make_unique<boost::asio::io_context>();
  auto signal = std::make_shared<StreamSignal>(io->get_executor());
  signal->Notify();
  signal->Close();
  io.reset();
  signal->Notify();
  signal.reset();
}

// ME-1 (shape): abandoned streams count once, as code 499, and as nothing else.
TEST_F(ApiTest, Me1AbandonedStreamsCountOnceAs499) {
  const auto calls = [&](const std::string& code) {
    double count = 0;
    for (const auto& family : registry_->Collect()) {
      if (family.name != "tandem_gateway_api_calls_total") continue;
      for (const auto& metric : family.metric) {
        for (const auto& label : metric.label) {
          if (label.name == "code" && (code == "any" || label.value == code)) {
            count += metric.counter.value;
          }
        }
      }
    }
    return count;
  };
  const auto observed = [&] {
    uint64_t count = 0;
    for (const auto& family : registry_->Collect()) {
      if (family.name != "tandem_gateway_api_call_duration_seconds") continue;
      for (const auto& metric : family.metric) count += metric.histogram.sample_count;
    }
    return count;
  };
  engine_.SetScript({.endless = true});
  for (int i = 0; i < 5; ++i) {
    HttpClient client(port());
    client.Send(PostText(kChatPath, Chat(R"(,"stream":true)")));
    ASSERT_TRUE(client.ReadUntil("Hello"));
  }
  ASSERT_TRUE(engine_.WaitUntilIdle(kSoon));
  http_server_.reset();  // returns when all calls have been counted
  EXPECT_EQ(calls("499"), 5);
  EXPECT_EQ(calls("any"), 5);
  EXPECT_EQ(observed(), 5u);
}

}  // namespace
}  // namespace tandem::gateway
