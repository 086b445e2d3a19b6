// The engine's logic on a fake clock and a worker played by the test.

#include "gateway/engine_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::gateway {
namespace {

constexpr int64_t kMs = 1'000'000;

struct RecordingPort final : WorkerPort {
  void Connect(uint64_t connection) override { connects.push_back(connection); }
  void Send(worker::v1::StepRequest request) override { steps.push_back(request.step()); }
  void QueryReady() override { ++queries; }
  void Disconnect() override { ++disconnects; }
  std::vector<uint64_t> connects;
  std::vector<worker::v1::Step> steps;
  int queries = 0;
  int disconnects = 0;
};

struct LastEvent final : GenerationListener {
  void OnEvent(GenerationEvent event) override {
    finished += event.finished ? 1 : 0;
    last = std::move(event);
  }
  GenerationEvent last;
  int finished = 0;
};

class EngineCoreTest : public ::testing::Test {
 protected:
  EngineCoreTest() {
    options_.step_timeout_ms = 1500;
    options_.idle_probe_ms = 1000;
    options_.reconnect_min_ms = 50;
    options_.reconnect_max_ms = 150;
    clock_.AdvanceNs(1000 * kMs);
    core_ = std::make_unique<EngineCore>(options_, &clock_, &metrics_, &board_, &port_);
  }

  void Event(uint64_t connection, decltype(WorkerEvent::what) what) {
    core_->Handle({.connection = connection, .what = std::move(what)});
    core_->Tick();
    core_->DeliverEvents();
  }
  void Event(decltype(WorkerEvent::what) what) { Event(port_.connects.back(), std::move(what)); }
  void Advance(int64_t ms) {
    clock_.AdvanceNs(ms * kMs);
    core_->Tick();
    core_->DeliverEvents();
  }

  static worker::v1::ModelInfo Info() {
    worker::v1::ModelInfo info;
    info.set_epoch(7);
    info.set_vocab_size(100);
    info.set_max_context_tokens(64);
    info.set_max_step_rows(16);
    info.set_max_sequences(4);
    auto* group = info.add_cache_groups();
    group->set_kind(worker::v1::CACHE_KIND_FULL);
    group->set_block_tokens(4);
    group->set_block_count(32);
    return info;
  }
  void Serve() {
    core_->Tick();
    ASSERT_EQ(port_.connects.size(), 1u);
    Event(WorkerConnected{.info = Info()});
    ASSERT_TRUE(board_.Ready().ok());
  }
  std::shared_ptr<LastEvent> Submit() {
    auto listener = std::make_shared<LastEvent>();
    GenerationRequest request;
    request.prompt = {1, 2, 3};
    request.stopping.max_tokens = 8;
    EXPECT_TRUE(board_.Enter(request).ok());
    core_->Submit(
        std::make_unique<OpenRequest>(next_++, request, listener, nullptr, clock_.NowNs()));
    core_->Tick();
    core_->DeliverEvents();
    return listener;
  }
  // An answer to `step` in which each sequence samples token 5.
  static worker::v1::StepResponse Answer(const worker::v1::Step& step) {
    worker::v1::StepResponse response;
    auto* result = response.mutable_result();
    result->set_step_id(step.step_id());
    result->set_epoch(7);
    result->set_outcome(worker::v1::STEP_OUTCOME_OK);
    for (const auto& sequence : step.sequences()) {
      auto* out = result->add_sequences();
      out->set_sequence_id(sequence.sequence_id());
      if (sequence.sample()) out->add_token_ids(5);
    }
    return response;
  }
  static void ExpectLost(const LastEvent& listener) {
    EXPECT_EQ(listener.finished, 1);
    EXPECT_EQ(listener.last.error.code(), absl::StatusCode::kUnavailable);
  }

  EngineOptions options_;
  FakeClock clock_;
  EngineMetrics metrics_{std::make_shared<prometheus::Registry>()};
  EngineBoard board_{{.max_requests = 10, .max_tokens = 1000}};
  RecordingPort port_;
  std::unique_ptr<EngineCore> core_;
  uint64_t next_ = 1;
};

TEST_F(EngineCoreTest, KeepsTwoStepsOutAndNoMore) {
  Serve();
  const auto listener = Submit();
  ASSERT_EQ(port_.steps.size(), 2u);
  EXPECT_TRUE(port_.steps[1].sequences(0).last_sampled());
  Event(Answer(port_.steps[0]));
  EXPECT_EQ(port_.steps.size(), 3u);
  EXPECT_EQ(listener->last.completion_tokens, 1u);
}

TEST_F(EngineCoreTest, LosesAWorkerExactlyAtTheDeadline) {
  Serve();
  const auto listener = Submit();
  Advance(1499);
  EXPECT_EQ(listener->finished, 0);
  Advance(1);
  ExpectLost(*listener);
  EXPECT_EQ(board_.Ready().code(), absl::StatusCode::kUnavailable);
  EXPECT_GT(port_.disconnects, 0);
}

// A health service that follows is right at every moment that Ready is, never a poll later.
TEST_F(EngineCoreTest, WhoFollowsServingIsToldAtOnce) {
  std::vector<bool> told;
  board_.FollowServing([&](bool serving) { told.push_back(serving); });
  EXPECT_EQ(told, std::vector<bool>({false}));
  Serve();
  EXPECT_TRUE(told.back());
  Submit();
  Advance(1500);
  EXPECT_EQ(board_.Ready().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(told.back());
  board_.StartDraining();
  const size_t before = told.size();
  board_.FollowServing({});
  board_.SetNotServing(absl::UnavailableError("later"));
  EXPECT_EQ(told.size(), before);
}

TEST_F(EngineCoreTest, NoHealthComesBackWhileDraining) {
  bool serving = true;
  board_.FollowServing([&](bool now) { serving = now; });
  board_.StartDraining();
  board_.SetServing({}, {});
  EXPECT_FALSE(serving);
}

TEST_F(EngineCoreTest, GivesAMomentMoreWhenItComesLateItself) {
  Serve();
  const auto listener = Submit();
  Advance(3000);
  EXPECT_EQ(listener->finished, 0);
  EXPECT_EQ(core_->NextDeadlineNs(), clock_.NowNs() + 200 * kMs);
  Advance(3000);
  ExpectLost(*listener);
}

TEST_F(EngineCoreTest, AHeartbeatMovesTheDeadline) {
  Serve();
  const auto listener = Submit();
  for (int i = 0; i < 5; ++i) {
    Advance(1400);
    worker::v1::StepResponse heartbeat;
    heartbeat.mutable_heartbeat()->set_step_id(1);
    Event(heartbeat);
    EXPECT_EQ(listener->finished, 0);
  }
  EXPECT_EQ(core_->NextDeadlineNs(), clock_.NowNs() + 1500 * kMs);
}

TEST_F(EngineCoreTest, ProbesAnIdleWorker) {
  Serve();
  Advance(999);
  EXPECT_EQ(port_.steps.size(), 0u);
  Advance(1);
  ASSERT_EQ(port_.steps.size(), 1u);
  EXPECT_EQ(port_.steps[0].sequences_size(), 0);
  Event(Answer(port_.steps[0]));
  EXPECT_TRUE(board_.Ready().ok());
  Advance(1000);
  ASSERT_EQ(port_.steps.size(), 2u);
  Advance(1500);
  EXPECT_EQ(board_.Ready().code(), absl::StatusCode::kUnavailable);
}

TEST_F(EngineCoreTest, BacksOffBetweenAttempts) {
  core_->Tick();
  std::vector<int64_t> delays;
  for (int i = 0; i < 4; ++i) {
    Event(WorkerLost{.status = absl::UnavailableError("no"), .while_loading = true});
    delays.push_back((core_->NextDeadlineNs() - clock_.NowNs()) / kMs);
    Advance(delays.back());
  }
  EXPECT_THAT(delays, ::testing::ElementsAre(50, 100, 150, 150));
  EXPECT_EQ(port_.connects.size(), 5u);
}

TEST_F(EngineCoreTest, IgnoresEventsOfAnOlderConnection) {
  Serve();
  Submit();
  Advance(1500);  // lost
  Advance(50);
  ASSERT_EQ(port_.connects.size(), 2u);
  Event(WorkerConnected{.info = Info()});
  Event(1, WorkerLost{.status = absl::UnavailableError("late")});
  Event(1, Answer(port_.steps[0]));
  EXPECT_TRUE(board_.Ready().ok());
}

TEST_F(EngineCoreTest, AnotherEpochMeansThatTheWorkerIsLost) {
  Serve();
  const auto listener = Submit();
  auto answer = Answer(port_.steps[0]);
  answer.mutable_result()->set_epoch(8);
  Event(answer);
  ExpectLost(*listener);
}

TEST_F(EngineCoreTest, AnswersOutOfTurnMeanThatTheWorkerIsLost) {
  Serve();
  const auto listener = Submit();
  Event(Answer(port_.steps[1]));
  ExpectLost(*listener);
}

TEST_F(EngineCoreTest, ARefusedStepMeansThatTheWorkerIsLost) {
  Serve();
  const auto listener = Submit();
  auto answer = Answer(port_.steps[0]);
  answer.mutable_result()->set_outcome(worker::v1::STEP_OUTCOME_INVALID);
  Event(answer);
  ExpectLost(*listener);
}

TEST_F(EngineCoreTest, AfterAFailedStepItWaitsUntilTheWorkerIsReady) {
  Serve();
  const auto listener = Submit();
  auto answer = Answer(port_.steps[0]);
  answer.mutable_result()->set_outcome(worker::v1::STEP_OUTCOME_UNAVAILABLE);
  answer.mutable_result()->clear_sequences();
  Event(answer);
  ExpectLost(*listener);
  EXPECT_EQ(port_.queries, 1);
  Event(WorkerReadiness{.ready = false});
  Advance(100);
  EXPECT_EQ(port_.queries, 2);
  EXPECT_EQ(board_.Ready().code(), absl::StatusCode::kUnavailable);
  auto second = Answer(port_.steps[1]);
  second.mutable_result()->set_outcome(worker::v1::STEP_OUTCOME_UNAVAILABLE);
  Event(second);
  EXPECT_EQ(listener->finished, 1);
  Event(WorkerReadiness{.ready = true});
  EXPECT_TRUE(board_.Ready().ok());
  ASSERT_EQ(port_.steps.size(), 3u) << "the worker is told to forget the sequence";
  EXPECT_EQ(port_.steps[2].release_sequence_ids_size(), 1);
  EXPECT_EQ(port_.connects.size(), 1u);
}

TEST_F(EngineCoreTest, ARequestThatComesTooLateEndsAtOnce) {
  Serve();
  GenerationRequest request;
  request.prompt = {1};
  request.stopping.max_tokens = 1;
  ASSERT_TRUE(board_.Enter(request).ok());
  Event(WorkerLost{.status = absl::UnavailableError("gone")});
  const auto listener = std::make_shared<LastEvent>();
  core_->Submit(std::make_unique<OpenRequest>(9, request, listener, nullptr, clock_.NowNs()));
  core_->DeliverEvents();
  ExpectLost(*listener);
  EXPECT_EQ(board_.waiting_requests(), 0u);
  EXPECT_TRUE(board_.WaitUntilEmpty(0));
}

}  // namespace
}  // namespace tandem::gateway
