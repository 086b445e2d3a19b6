// Worker death, silence, broken streams, failed steps and refused loads, against a real connection.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/gateway/engine_fixture.h"

namespace tandem::gateway {
namespace {

using ::testing::HasSubstr;

std::vector<uint32_t> Tokens(uint32_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class EngineFaults : public GrpcEngineFixture {
 protected:
  static EngineOptions Quick(uint32_t step_timeout_ms = 10000) {
    EngineOptions options;
    options.step_timeout_ms = step_timeout_ms;
    options.reconnect_min_ms = 10;
    options.reconnect_max_ms = 50;
    return options;
  }
  // Some that run and some that wait.
  std::vector<std::shared_ptr<Collector>> SubmitSome() {
    std::vector<std::shared_ptr<Collector>> all;
    for (uint32_t i = 0; i < 6; ++i) all.push_back(Submit(Request(Tokens(6, 40 * i), 200)));
    EXPECT_TRUE(all[0]->WaitTokens(2));
    return all;
  }
  static void ExpectOneUnavailableEach(const std::vector<std::shared_ptr<Collector>>& all) {
    for (const auto& collector : all) {
      ASSERT_TRUE(collector->WaitFinished());
      EXPECT_EQ(collector->terminal_events(), 1);
      EXPECT_EQ(collector->last().reason, FinishReason::kError);
      EXPECT_EQ(collector->last().error.code(), absl::StatusCode::kUnavailable);
      EXPECT_NE(collector->last().error.message(), "");
    }
  }
  void ExpectServes() {
    ASSERT_TRUE(WaitReady()) << engine_->Ready();
    const GenerationRequest request = Request(Tokens(9, 3), 12);
    const auto got = Submit(request);
    ASSERT_TRUE(got->WaitFinished());
    EXPECT_EQ(got->tokens(), Expected(request)) << got->last().error;
    EXPECT_TRUE(AtRest());
  }
};

TEST_F(EngineFaults, AWorkerThatDiesEndsEveryStreamOnceAndServiceComesBack) {
  Serve({.max_sequences = 3, .step_delay_ms = 5}, Quick());
  for (int round = 0; round < 3; ++round) {
    const auto all = SubmitSome();
    worker_->Kill();
    ExpectOneUnavailableEach(all);
    EXPECT_EQ(engine_->Ready().code(), absl::StatusCode::kUnavailable);
    const auto refused = engine_->Submit(Request(Tokens(3), 3), std::make_shared<Collector>());
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
    ASSERT_TRUE(worker_->Start());
    ExpectServes();
  }
  EXPECT_EQ(Metric("tandem_gateway_worker_losses_total"), 3);
  EXPECT_EQ(Metric("tandem_gateway_worker_up"), 1);
}

TEST_F(EngineFaults, ANewEpochEmptiesThePrefixCacheABrokenStreamDoesNot) {
  Serve({}, Quick());
  const GenerationRequest request = Request(Tokens(20), 3);
  ASSERT_TRUE(Submit(request)->WaitFinished());

  worker_->set_hung(true);
  const auto lost = Submit(Request(Tokens(5, 500), 100));
  ASSERT_TRUE(Eventually([&] { return Metric("tandem_gateway_running_sequences") == 1; }));
  worker_->BreakStream();
  ExpectOneUnavailableEach({lost});
  worker_->set_hung(false);
  ASSERT_TRUE(Eventually([&] { return worker_->loads() >= 2; }));
  ASSERT_TRUE(WaitReady());
  const auto same = Submit(request);
  ASSERT_TRUE(same->WaitFinished());
  EXPECT_EQ(same->last().cached_tokens, 16u);
  EXPECT_EQ(same->tokens(), Expected(request));

  worker_->Kill();
  ASSERT_TRUE(Eventually([&] { return !engine_->Ready().ok(); }));
  ASSERT_TRUE(worker_->Start());
  ASSERT_TRUE(WaitReady());
  const auto fresh = Submit(request);
  ASSERT_TRUE(fresh->WaitFinished());
  EXPECT_EQ(fresh->last().cached_tokens, 0u);
  EXPECT_EQ(fresh->tokens(), Expected(request));
}

TEST_F(EngineFaults, AHungWorkerIsNoticed) {
  Serve({.step_delay_ms = 5}, Quick(/*step_timeout_ms=*/400));
  const auto all = SubmitSome();
  worker_->set_hung(true);
  ExpectOneUnavailableEach(all);
  EXPECT_THAT(std::string(all[0]->last().error.message()), HasSubstr("progress"));
  worker_->set_hung(false);
  ExpectServes();
}

TEST_F(EngineFaults, AHungWorkerIsNoticedWhenIdle) {
  EngineOptions options = Quick(/*step_timeout_ms=*/200);
  options.idle_probe_ms = 20;
  Serve({}, options);
  worker_->set_hung(true);
  EXPECT_TRUE(Eventually([&] { return !engine_->Ready().ok(); }));
  worker_->set_hung(false);
  ExpectServes();
}

TEST_F(EngineFaults, ASlowStepWithHeartbeatsIsNotLost) {
  Serve({.step_delay_ms = 1000}, Quick(/*step_timeout_ms=*/400));
  const GenerationRequest request = Request(Tokens(5), 2);
  const auto got = Submit(request);
  ASSERT_TRUE(got->WaitFinished());
  EXPECT_EQ(got->tokens(), Expected(request)) << got->last().error;
  EXPECT_EQ(Metric("tandem_gateway_worker_losses_total"), 0);
}

TEST_F(EngineFaults, AFailedStepEndsOpenRequestsAndServiceResumesWhenTheWorkerIsReady) {
  Serve({.max_sequences = 3, .step_delay_ms = 5}, Quick());
  const auto all = SubmitSome();
  worker_->FailNextStep("expert worker 1 was lost");
  ExpectOneUnavailableEach(all);
  EXPECT_THAT(std::string(all[0]->last().error.message()), HasSubstr("expert worker 1"));
  EXPECT_EQ(engine_->Ready().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->Submit(Request(Tokens(3), 3), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kUnavailable);
  worker_->set_ready(true);
  ExpectServes();
  EXPECT_EQ(worker_->loads(), 1u) << "the connection was kept";
}

TEST_F(EngineFaults, AWorkerThatDiesWhileRecoveringIsFoundAgain) {
  Serve({.step_delay_ms = 5}, Quick());
  const auto all = SubmitSome();
  worker_->FailNextStep("expert worker 0 was lost");
  ExpectOneUnavailableEach(all);
  worker_->Kill();
  worker_->set_ready(true);
  ASSERT_TRUE(worker_->Start());
  ASSERT_TRUE(Eventually([&] { return worker_->loads() >= 2; }));
  ExpectServes();
}

TEST_F(EngineFaults, AnEngineWaitsForItsWorker) {
  ASSERT_NO_FATAL_FAILURE(StartWorker({}));
  worker_->Kill();
  StartEngine(Quick());
  EXPECT_EQ(engine_->Ready().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(engine_->Model());
  ASSERT_TRUE(worker_->Start());
  ExpectServes();
}

TEST_F(EngineFaults, AModelThatCannotBeLoadedIsNotTriedAgain) {
  ASSERT_NO_FATAL_FAILURE(StartWorker({}));
  worker_->set_load_status({grpc::StatusCode::DATA_LOSS, "model.safetensors: tensor x is short"});
  StartEngine(Quick());
  ASSERT_TRUE(Eventually([&] { return engine_->Ready().code() == absl::StatusCode::kDataLoss; }));
  EXPECT_THAT(std::string(engine_->Ready().message()), HasSubstr("tensor x is short"));
  EXPECT_EQ(worker_->loads(), 1u);
  EXPECT_EQ(engine_->Submit(Request(Tokens(3), 3), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(EngineFaults, ALoadThatFailsForNowIsTriedAgain) {
  ASSERT_NO_FATAL_FAILURE(StartWorker({}));
  worker_->set_load_status({grpc::StatusCode::UNAVAILABLE, "expert workers are starting"});
  StartEngine(Quick());
  ASSERT_TRUE(Eventually([&] { return worker_->loads() >= 3; }));
  EXPECT_THAT(std::string(engine_->Ready().message()), HasSubstr("expert workers are starting"));
  worker_->set_load_status(grpc::Status::OK);
  ExpectServes();
}

TEST_F(EngineFaults, DestructionDoesNotWaitForAHungWorker) {
  Serve({}, Quick());
  worker_->set_hung(true);
  const auto open = Submit(Request(Tokens(5), 50));
  engine_.reset();
  ExpectOneUnavailableEach({open});
}

}  // namespace
}  // namespace tandem::gateway
