// The engine behind the service: loading, sessions, and the queue between reader and executor.

#include "gpu_worker/engine.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/select.h"
#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

constexpr std::chrono::seconds kPatience{60};

class CollectingSink : public StepSink {
 public:
  bool Write(const v1::StepResponse& response) override {
    const std::lock_guard lock(mutex_);
    if (response.has_result()) results_.push_back(response.result());
    changed_.notify_all();
    return true;
  }
  void Cancel() override {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }
  v1::StepResult Await(size_t index) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [&] { return results_.size() > index; })) return {};
    return results_[index];
  }
  bool cancelled() {
    const std::lock_guard lock(mutex_);
    return cancelled_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<v1::StepResult> results_;
  bool cancelled_ = false;
};

class GpuEngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto dir = tandem::testing::SharedPath("golden/models/qwen3_moe");
    if (!dir) GTEST_SKIP() << "no golden/models/qwen3_moe";
    dir_ = dir->string();
    WorkerOptions options;
    options.kernels = kernels::SelectKernelTable(Isa::kAmx, DetectCpuFeatures());
    options.threads = 2;
    options.inprocess_experts = true;
    options.expert_shares = {1};
    options.max_step_rows = 32;
    options.max_sequences = 2;
    options.max_context = 64;
    options.epoch = 77;
    engine_ = std::make_unique<GpuEngine>(options);
  }
  GpuEngine::State Load(const std::string& dir) {
    EXPECT_TRUE(engine_->StartLoad(dir).ok());
    return engine_->WaitForLoad(kPatience);
  }
  static void Push(GpuEngine::Session& session, const v1::Step& step) {
    v1::StepRequest* request = session.Acquire();
    ASSERT_NE(request, nullptr);
    *request->mutable_step() = step;
    request->mutable_step()->set_epoch(77);
    session.Push();
  }
  static v1::Step Prompt(uint64_t id) {
    v1::Step step;
    AddStart(step, id);
    AddTokens(step, id, 0, {2, 3, 4}, {0}, true);
    return step;
  }
  static v1::Step Decode(uint64_t id, uint32_t position) {
    v1::Step step;
    AddDecode(step, id, position);
    return step;
  }

  std::string dir_;
  std::unique_ptr<GpuEngine> engine_;
};

TEST_F(GpuEngineTest, LoadsOnceAndRefusesAnotherModel) {
  const GpuEngine::State state = Load(dir_);
  ASSERT_EQ(state.phase, GpuEngine::Phase::kReady) << state.error;
  EXPECT_TRUE(state.ready);
  ASSERT_TRUE(state.info.has_value());
  EXPECT_EQ(state.info->epoch(), 77u);
  EXPECT_EQ(state.info->vocab_size(), 256u);
  EXPECT_EQ(state.info->max_context_tokens(), 64u);
  EXPECT_EQ(state.info->cache_groups(0).block_count(), 2u * 64 / 16);
  EXPECT_EQ(state.progress.phase, "warmup");
  EXPECT_GE(state.progress.loaded_bytes, state.progress.total_bytes);
  EXPECT_TRUE(engine_->StartLoad(dir_).ok());
  EXPECT_EQ(engine_->StartLoad("/nowhere").code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(GpuEngineTest, FailedLoadSaysWhyAndMayBeTriedAgain) {
  const GpuEngine::State failed = Load("/nowhere");
  EXPECT_EQ(failed.phase, GpuEngine::Phase::kFailed);
  EXPECT_NE(std::string(failed.error.message()).find("/nowhere"), std::string::npos);
  EXPECT_EQ(Load(dir_).phase, GpuEngine::Phase::kReady);
}

TEST_F(GpuEngineTest, SessionNeedsAModel) {
  CollectingSink sink;
  EXPECT_EQ(engine_->OpenSession(&sink).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(GpuEngineTest, AnswersStepsInOrder) {
  ASSERT_TRUE(Load(dir_).ready);
  CollectingSink sink;
  auto session = engine_->OpenSession(&sink);
  ASSERT_TRUE(session.ok());
  constexpr uint32_t kSteps = 12;  // positions of one block
  v1::Step step = Prompt(1);
  for (uint32_t i = 0; i < kSteps; ++i) {
    step.set_step_id(i);
    Push(**session, step);
    step = Decode(1, 3 + i);
  }
  for (uint32_t i = 0; i < kSteps; ++i) {
    const v1::StepResult result = sink.Await(i);
    EXPECT_EQ(result.step_id(), i);
    EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
  }
  EXPECT_EQ(engine_->counters().steps, kSteps);
}

TEST_F(GpuEngineTest, NewSessionEndsTheOldOneAndForgetsItsSequences) {
  ASSERT_TRUE(Load(dir_).ready);
  CollectingSink first;
  auto old = engine_->OpenSession(&first);
  ASSERT_TRUE(old.ok());
  Push(**old, Prompt(1));
  EXPECT_EQ(first.Await(0).outcome(), v1::STEP_OUTCOME_OK);
  // The reader of the old stream leaves when its sink was cancelled.
  std::thread reader([&] {
    while (!first.cancelled()) std::this_thread::yield();
    EXPECT_EQ((*old)->Acquire(), nullptr);
    old->reset();
  });
  CollectingSink second;
  auto session = engine_->OpenSession(&second);
  reader.join();
  ASSERT_TRUE(session.ok());
  Push(**session, Decode(1, 3));
  EXPECT_EQ(second.Await(0).outcome(), v1::STEP_OUTCOME_INVALID);
  Push(**session, Prompt(1));
  EXPECT_EQ(second.Await(1).outcome(), v1::STEP_OUTCOME_OK);
}

TEST_F(GpuEngineTest, StopEndsSessions) {
  ASSERT_TRUE(Load(dir_).ready);
  CollectingSink sink;
  auto session = engine_->OpenSession(&sink);
  ASSERT_TRUE(session.ok());
  engine_->Stop();
  EXPECT_TRUE(sink.cancelled());
  EXPECT_EQ((*session)->Acquire(), nullptr);
  EXPECT_FALSE(engine_->StartLoad(dir_).ok());
}

}  // namespace
}  // namespace tandem::gpu
