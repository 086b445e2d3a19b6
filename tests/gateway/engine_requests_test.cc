// Requests through the engine and a fake worker: tokens, text, stops, logprobs, queue,
// cancellation.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/gateway/engine_fixture.h"

namespace tandem::gateway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<uint32_t> Tokens(uint32_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class EngineTest : public GrpcEngineFixture {};

TEST_F(EngineTest, GeneratesWhatTheModelDoes) {
  Serve();
  const auto model = engine_->Model();
  ASSERT_TRUE(model);
  EXPECT_EQ(model->name, "fake");
  EXPECT_EQ(model->vocab_size, 1000u);
  EXPECT_EQ(model->max_context_tokens, 257u) << "the cache is smaller than the context";
  const GenerationRequest request = Request(Tokens(50), 20);
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->tokens(), Expected(request));
  EXPECT_EQ(got->last().reason, FinishReason::kLength);
  EXPECT_EQ(got->last().prompt_tokens, 50u);
  EXPECT_EQ(got->last().completion_tokens, 20u);
  EXPECT_EQ(got->text(), "");
  EXPECT_LE(worker_->largest_step(), 32u);
  EXPECT_TRUE(AtRest());
}

TEST_F(EngineTest, ManyRequestsAtOnceAllGetTheirOwnTokens) {
  Serve({.groups = {{.block_tokens = 4, .block_count = 40}}}, {});
  std::vector<GenerationRequest> requests;
  std::vector<std::shared_ptr<Collector>> collectors;
  for (uint32_t i = 0; i < 40; ++i) {
    requests.push_back(Request(Tokens(3 + i % 17, 11 * i), 5 + i % 23));
    requests.back().sampling.seed = i;
    requests.back().tenant = std::string(1, static_cast<char>('a' + i % 3));
    collectors.push_back(Submit(requests.back()));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(collectors[i]->WaitFinished()) << i;
    EXPECT_EQ(collectors[i]->tokens(), Expected(requests[i])) << i;
    EXPECT_EQ(collectors[i]->terminal_events(), 1);
  }
  EXPECT_TRUE(AtRest());
  EXPECT_EQ(Metric("tandem_gateway_requests_total", "length"), 40);
}

TEST_F(EngineTest, TextIsTheSameHoweverItStreams) {
  Serve({}, {}, LetterText());
  worker_->set_script(Tokens(26));
  const auto got = Submit(Request({1, 2, 3}, 10));
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->text(), "abcdefghij");
}

TEST_F(EngineTest, AStopStringEndsTheTextAndDropsWhatIsInFlight) {
  Serve({}, {}, LetterText());
  worker_->set_script(Tokens(26));
  GenerationRequest request = Request({1, 2, 3}, 20);
  request.stopping.stop_strings = {"xyz", "def"};
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->text(), "abc");
  EXPECT_EQ(got->last().reason, FinishReason::kStop);
  EXPECT_EQ(got->last().matched_stop, "def");
  EXPECT_EQ(got->last().completion_tokens, 6u) << "the token that completed it counts, no other";
  EXPECT_TRUE(AtRest());
  EXPECT_EQ(Metric("tandem_gateway_generation_tokens_total"), 6);
}

TEST_F(EngineTest, AStopStringWaitsForMinTokens) {
  Serve({}, {}, LetterText());
  worker_->set_script({0, 1});
  GenerationRequest request = Request({1, 2, 3}, 20);
  request.stopping.stop_strings = {"ab"};
  request.stopping.min_tokens = 5;
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->text(), "ababab");
  EXPECT_EQ(got->last().completion_tokens, 8u);
}

TEST_F(EngineTest, HeldBackTextComesOutAtTheEnd) {
  Serve({}, {}, LetterText());
  worker_->set_script(Tokens(26));
  GenerationRequest request = Request({1, 2, 3}, 4);
  request.stopping.stop_strings = {"cdef"};
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->text(), "abcd");
  EXPECT_EQ(got->last().reason, FinishReason::kLength);
}

TEST_F(EngineTest, AStopTokenCountsAndHasNoText) {
  EngineOptions options;
  options.end_ids = {3};
  Serve({}, options, LetterText());
  worker_->set_script(Tokens(26));
  const auto got = Submit(Request({1, 2}, 20));
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->text(), "abc");
  EXPECT_THAT(got->tokens(), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(got->last().reason, FinishReason::kStop);
  EXPECT_EQ(got->last().matched_stop_token, 3u);
  EXPECT_EQ(got->last().completion_tokens, 4u);

  GenerationRequest on = Request({1, 2}, 6);
  on.stopping.ignore_eos = true;
  const auto ignored = Submit(on);
  ASSERT_TRUE(ignored->WaitFinished());
  EXPECT_EQ(ignored->text(), "abcdef");
  EXPECT_EQ(ignored->last().reason, FinishReason::kLength);
}

TEST_F(EngineTest, StopIdsAreMaskedUntilMinTokens) {
  Serve();
  GenerationRequest request = Request(Tokens(5), 30);
  request.stopping.stop_token_ids = Tokens(600);
  request.stopping.stop_token_ids.resize(200);
  request.stopping.min_tokens = 12;
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->tokens(), Expected(request));
  EXPECT_GE(got->tokens().size(), 12u);
}

TEST_F(EngineTest, ReportsLogprobsOfEveryToken) {
  Serve();
  GenerationRequest request = Request(Tokens(5), 7);
  request.top_logprobs = 3;
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  const auto logprobs = got->logprobs();
  ASSERT_EQ(logprobs.size(), 7u);
  for (size_t i = 0; i < logprobs.size(); ++i) {
    EXPECT_EQ(logprobs[i].token_id, got->tokens()[i]);
    EXPECT_EQ(logprobs[i].logprob, testing::FakeGpuWorker::LogprobOf(got->tokens()[i]));
    EXPECT_EQ(logprobs[i].top.size(), 3u);
  }
}

TEST_F(EngineTest, ReportsPromptLogprobsOnceWithoutThePrefixCache) {
  EngineOptions options;
  options.prefill_chunk_tokens = 5;
  Serve({}, options);
  GenerationRequest request = Request(Tokens(13), 2);
  for (int round = 0; round < 2; ++round) {
    request.prompt_top_logprobs = round;
    const auto got = Submit(request);
    ASSERT_TRUE(got->WaitFinished());
    const auto logprobs = got->prompt_logprobs();
    ASSERT_EQ(logprobs.size(), 12u);
    for (uint32_t i = 0; i < 12; ++i) EXPECT_EQ(logprobs[i].token_id, i + 1);
    EXPECT_THAT(got->logprobs(), IsEmpty());
    EXPECT_EQ(got->last().cached_tokens, 0u);
  }
}

TEST_F(EngineTest, MaxTokensZeroOnlyScoresThePrompt) {
  Serve();
  GenerationRequest request = Request(Tokens(9), 0);
  request.prompt_top_logprobs = 0;
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->prompt_logprobs().size(), 8u);
  EXPECT_THAT(got->tokens(), IsEmpty());
  EXPECT_EQ(got->last().reason, FinishReason::kLength);
}

TEST_F(EngineTest, ReusesAPrefixOfTheSameTenant) {
  Serve();
  GenerationRequest request = Request(Tokens(20), 3);
  request.tenant = "a";
  ASSERT_TRUE(Submit(request)->WaitFinished());
  const auto again = Submit(request);
  ASSERT_TRUE(again->WaitFinished());
  EXPECT_EQ(again->last().cached_tokens, 16u);
  EXPECT_EQ(again->tokens(), Expected(request));
  request.tenant = "b";
  const auto other = Submit(request);
  ASSERT_TRUE(other->WaitFinished());
  EXPECT_EQ(other->last().cached_tokens, 0u);
  EXPECT_EQ(Metric("tandem_gateway_prefix_cache_hit_tokens_total"), 16);
  EXPECT_EQ(Metric("tandem_gateway_prefix_cache_query_tokens_total"), 60);
}

TEST_F(EngineTest, PreemptedRequestsGoOnAsIfNothingHappened) {
  Serve({.groups = {{.block_tokens = 4, .block_count = 14}}}, {});
  std::vector<GenerationRequest> requests;
  std::vector<std::shared_ptr<Collector>> collectors;
  for (uint32_t i = 0; i < 4; ++i) {
    requests.push_back(Request(Tokens(6, 100 * i), 40));
    collectors.push_back(Submit(requests.back()));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(collectors[i]->WaitFinished()) << i;
    EXPECT_EQ(collectors[i]->tokens(), Expected(requests[i])) << i;
  }
  EXPECT_TRUE(AtRest());
  EXPECT_GT(Metric("tandem_gateway_preemptions_total"), 0);
}

TEST_F(EngineTest, RefusesWhatCannotBeServed) {
  Serve();
  const auto code = [&](const GenerationRequest& request) {
    return engine_->Submit(request, std::make_shared<Collector>()).status().code();
  };
  EXPECT_EQ(code(Request({}, 5)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request({1000}, 5)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request(Tokens(5), 5000)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request(Tokens(5), 300)), absl::StatusCode::kInvalidArgument)
      << "fits the context, never the KV cache";
  GenerationRequest request = Request(Tokens(5), 5);
  request.stopping.stop_strings = {"x"};
  EXPECT_EQ(code(request), absl::StatusCode::kInvalidArgument) << "there is no tokenizer";
  request = Request(Tokens(5), 5);
  request.sampling.logit_bias[9999999] = 5;
  EXPECT_EQ(code(request), absl::StatusCode::kInvalidArgument);
  request = Request(Tokens(5), 5);
  request.top_logprobs = 21;
  EXPECT_EQ(code(request), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Metric("tandem_gateway_rejected_requests_total", "invalid"), 7);
  EXPECT_EQ(Metric("tandem_gateway_requests_total"), 0);
  const auto good = Submit(Request(Tokens(5), 5));
  EXPECT_TRUE(good->WaitFinished());
}

TEST_F(EngineTest, AFullQueueRefusesAndAdmittedStreamsGoOn) {
  EngineOptions options;
  options.max_queue_requests = 3;
  Serve({.max_sequences = 1}, options);
  worker_->set_hung(true);
  std::vector<std::shared_ptr<Collector>> in = {Submit(Request(Tokens(5), 50))};
  ASSERT_TRUE(Eventually([&] { return Metric("tandem_gateway_running_sequences") == 1; }));
  for (uint32_t i = 0; i < 3; ++i) in.push_back(Submit(Request(Tokens(5, 10 * i), 3)));
  const auto refused = engine_->Submit(Request(Tokens(5), 3), std::make_shared<Collector>());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("queue is full"));
  worker_->set_hung(false);
  for (const auto& collector : in) {
    ASSERT_TRUE(collector->WaitFinished());
    EXPECT_EQ(collector->last().reason, FinishReason::kLength) << collector->last().error;
  }
  EXPECT_EQ(Metric("tandem_gateway_rejected_requests_total", "queue_full"), 1);
  EXPECT_TRUE(AtRest());
}

TEST_F(EngineTest, CancelEndsARunningRequestAndFreesItsBlocks) {
  Serve({.step_delay_ms = 5}, {});
  const auto running = Submit(Request(Tokens(5), 200));
  const uint64_t handle = handle_;
  ASSERT_TRUE(running->WaitTokens(3));
  engine_->Cancel(handle);
  engine_->Cancel(handle);
  ASSERT_TRUE(running->WaitFinished());
  EXPECT_EQ(running->last().reason, FinishReason::kCancelled);
  EXPECT_TRUE(running->last().error.ok());
  EXPECT_TRUE(AtRest());
  engine_->Cancel(handle);
  engine_->Cancel(9999);
  EXPECT_TRUE(Submit(Request(Tokens(5), 5))->WaitFinished());
  EXPECT_EQ(running->terminal_events(), 1);
}

TEST_F(EngineTest, CancelEndsAWaitingRequest) {
  Serve({.max_sequences = 1, .step_delay_ms = 5}, {});
  const auto running = Submit(Request(Tokens(5), 100));
  ASSERT_TRUE(running->WaitTokens(1));
  const auto waiting = Submit(Request(Tokens(5, 50), 100));
  engine_->Cancel(handle_);
  ASSERT_TRUE(waiting->WaitFinished());
  EXPECT_EQ(waiting->last().reason, FinishReason::kCancelled);
  EXPECT_FALSE(running->finished());
  engine_->Cancel(handle_ - 1);
  ASSERT_TRUE(running->WaitFinished());
  EXPECT_TRUE(AtRest());
}

TEST_F(EngineTest, AListenerMayCancelFromItsEvent) {
  class Canceller final : public GenerationListener {
   public:
    explicit Canceller(Engine* engine) : engine_(engine) {}
    void OnEvent(GenerationEvent event) override {
      if (!event.finished) engine_->Cancel(1);
      if (event.finished) reason = event.reason;
    }
    std::atomic<FinishReason> reason{FinishReason::kNone};

   private:
    Engine* engine_;
  };
  Serve({.step_delay_ms = 2}, {});
  const auto listener = std::make_shared<Canceller>(engine_.get());
  ASSERT_TRUE(engine_->Submit(Request(Tokens(5), 200), listener).ok());
  EXPECT_TRUE(Eventually([&] { return listener->reason == FinishReason::kCancelled; }));
  EXPECT_TRUE(Eventually([&] { return listener.use_count() == 1; })) << "listeners are released";
}

// Trial ME-1: requests that clients abandoned count in every sum or in none.
TEST_F(EngineTest, ME_1_CancelledRequestsAreCountedInEverySum) {
  Serve({.max_sequences = 3, .step_delay_ms = 5}, {});
  ASSERT_TRUE(Submit(Request(Tokens(9), 4))->WaitFinished());
  std::vector<std::shared_ptr<Collector>> all;
  std::vector<uint64_t> handles;
  for (uint32_t i = 0; i < 5; ++i) {
    all.push_back(Submit(Request(Tokens(7, 30 * i), 200)));
    handles.push_back(handle_);
  }
  ASSERT_TRUE(all[0]->WaitTokens(2));
  for (const uint64_t handle : handles) engine_->Cancel(handle);
  for (const auto& collector : all) ASSERT_TRUE(collector->WaitFinished());
  ASSERT_TRUE(AtRest());
  EXPECT_EQ(Metric("tandem_gateway_requests_total", "cancelled"), 5);
  EXPECT_EQ(Metric("tandem_gateway_requests_total"), 6);
  for (const char* histogram :
       {"tandem_gateway_queue_time_seconds", "tandem_gateway_request_duration_seconds",
        "tandem_gateway_request_prompt_tokens", "tandem_gateway_request_generation_tokens"}) {
    EXPECT_EQ(MetricCount(histogram), 6) << histogram;
  }
  EXPECT_EQ(Metric("tandem_gateway_prompt_tokens_total"),
            Metric("tandem_gateway_request_prompt_tokens"));
  EXPECT_EQ(Metric("tandem_gateway_prompt_tokens_total"), 9 + 5 * 7);
  EXPECT_EQ(Metric("tandem_gateway_generation_tokens_total"),
            Metric("tandem_gateway_request_generation_tokens"));
}

TEST_F(EngineTest, DrainLetsAdmittedRequestsFinishAndRefusesNewOnes) {
  Serve({.step_delay_ms = 2}, {});
  const auto admitted = Submit(Request(Tokens(5), 30));
  engine_->Drain(20000);
  EXPECT_TRUE(admitted->finished());
  EXPECT_EQ(admitted->last().reason, FinishReason::kLength);
  EXPECT_EQ(engine_->Ready().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->Submit(Request(Tokens(5), 3), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(EngineTest, DestructionEndsOpenRequests) {
  Serve({.max_sequences = 1, .step_delay_ms = 5}, {});
  const auto running = Submit(Request(Tokens(5), 200));
  const auto waiting = Submit(Request(Tokens(5), 200));
  engine_->Drain(10);
  engine_.reset();
  for (const auto& collector : {running, waiting}) {
    ASSERT_EQ(collector->terminal_events(), 1);
    EXPECT_EQ(collector->last().reason, FinishReason::kError);
    EXPECT_EQ(collector->last().error.code(), absl::StatusCode::kUnavailable);
  }
}

}  // namespace
}  // namespace tandem::gateway
