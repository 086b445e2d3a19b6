// After warm-up nothing is allocated between a request and its sampled tokens: every operator new
// of this binary is counted while steps run. Request and result are reused, as the service does.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <thread>

#include "tests/gpu_worker/step_test_util.h"

namespace {

std::atomic<int64_t> allocations{0};
// A thread that is no part of any step.
thread_local bool is_apart = false;

void* CountedNew(std::size_t bytes) {
  if (!is_apart) allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return CountedNew(bytes); }
void* operator new[](std::size_t bytes) { return CountedNew(bytes); }
// Libraries allocate with these and free with the deletes below.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return CountedNew(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return CountedNew(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace tandem::gpu {
namespace {

// Tells the copier from the threads of a step: streamed experts are read by the latter.
class CopierMarkingSource final : public ExpertWeightSource {
 public:
  explicit CopierMarkingSource(ExpertWeightSource& source) : source_(source) {}
  absl::Status Read(int layer, int expert, CanonicalExpert* out) override {
    is_apart = is_apart || std::this_thread::get_id() != step_thread_;
    return source_.Read(layer, expert, out);
  }
  bool available() const override { return source_.available(); }

 private:
  ExpertWeightSource& source_;
  const std::thread::id step_thread_ = std::this_thread::get_id();
};

class StepAllocationTest : public StepRunnerTestBase {
 protected:
  void ExpectNoneOfDecodeAndPrefillSteps();

  uint64_t measured_migrations_ = 0;  // by the decode steps that were measured
};

TEST_F(StepAllocationTest, DecodeAndPrefillStepsAllocateNothing) {
  Load("qwen3_moe", {});
  if (!IsSkipped()) ExpectNoneOfDecodeAndPrefillSteps();
}

TEST_F(StepAllocationTest, TracedStepsAllocateNothing) {
  Tracer tracer;
  GoldenOptions options;
  options.tracer = &tracer;
  Load("qwen3_moe", options);
  if (IsSkipped()) return;
  ASSERT_TRUE(tracer.Start().ok());
  ExpectNoneOfDecodeAndPrefillSteps();
  size_t events = 0;
  for (const TraceLog::Track& track : tracer.Stop().tracks) events += track.events.size();
  EXPECT_GT(events, 0u);
}

// Before each step a copy has ended: it becomes resident, and the next one begins.
TEST_F(StepAllocationTest, StepsBetweenWhichExpertsMoveAllocateNothing) {
  GoldenOptions options;
  options.hot_experts_bytes = uint64_t{1} << 30;
  options.hot_policy.min_steps = 3;
  options.hot_policy.planner.max_in_flight = 1;
  options.stream_prompts = true;
  options.fixed_streamed = 2;
  options.wrap_source = [](ExpertWeightSource& source) {
    return std::make_unique<CopierMarkingSource>(source);
  };
  Load("qwen3_moe", options);
  if (IsSkipped()) return;
  ExpectNoneOfDecodeAndPrefillSteps();
  const HotExperts::Counters counters = model_->hot_experts()->counters();
  EXPECT_GT(measured_migrations_, 4u);
  EXPECT_GT(counters.streamed_experts, 0u);
  EXPECT_GT(model_->runner().pipeline().counters().resident_picks, 0u);
}

void StepAllocationTest::ExpectNoneOfDecodeAndPrefillSteps() {
  std::vector<uint32_t> prompt(16);
  std::iota(prompt.begin(), prompt.end(), 2);
  const auto length = static_cast<uint32_t>(prompt.size());
  v1::Step prefill;
  v1::StepResult result;
  for (uint64_t id = 1; id <= 3; ++id) {
    v1::SequenceStart& start = AddStart(prefill, id);
    start.mutable_sampling()->set_top_logprobs(5);
    start.mutable_sampling()->set_temperature(0.7f);
    start.mutable_sampling()->set_presence_penalty(0.5f);
    start.mutable_stopping()->add_stop_token_ids(255);
    start.mutable_stopping()->set_min_tokens(100);
    (*start.mutable_sampling()->mutable_logit_bias())[9] = 0.5f;
    start.set_prompt_logprobs(2);
    const auto block = static_cast<uint32_t>(4 * id);
    AddTokens(prefill, id, 0, prompt, {block, block + 1}, true);
  }
  StepRunner& runner = model_->runner();
  runner.Run(prefill, result);
  ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
  v1::Step decode;
  for (uint64_t id = 1; id <= 3; ++id) AddDecode(decode, id, length);
  HotExperts* const hot = model_->hot_experts();
  const auto run_decode = [&](uint32_t position) {
    if (hot != nullptr) hot->WaitForCopies();
    for (auto& sequence : *decode.mutable_sequences()) sequence.set_start_position(position);
    const int64_t before = allocations.load();
    runner.Run(decode, result);
    return allocations.load() - before;
  };
  run_decode(length);  // warm-up: the result's messages
  ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
  const uint64_t migrations = hot == nullptr ? 0 : hot->counters().migrations;
  for (uint32_t position = length + 1; position < length + 15; ++position) {
    EXPECT_EQ(run_decode(position), 0) << "decode at " << position;
    ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
    ASSERT_EQ(result.sequences(2).logprobs_size(), 1);
  }
  if (hot != nullptr) measured_migrations_ = hot->counters().migrations - migrations;
  // Prefill in slots that were used before.
  for (uint64_t id = 1; id <= 3; ++id) prefill.add_release_sequence_ids(id);
  runner.Run(prefill, result);
  const int64_t before = allocations.load();
  runner.Run(prefill, result);
  EXPECT_EQ(allocations.load() - before, 0);
  EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
}

}  // namespace
}  // namespace tandem::gpu
