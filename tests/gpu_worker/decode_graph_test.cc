// What a CUDA graph needs: a decode step enqueues the same list of ops, addresses included, for any
// routing, lengths and sequences within a bucket.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/fakes/recording_backend.h"
#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

class DecodeGraphTest : public StepRunnerTestBase,
                        public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    GoldenOptions options;
    options.wrap = [this](CpuBackend& backend) {
      auto recording = std::make_unique<RecordingBackend>(&backend);
      recording_ = recording.get();
      return recording;
    };
    Load(GetParam(), options);
  }
  // Prompts of these lengths, then one decode step of all of them; returns the decode's graph.
  std::vector<RecordedOp> DecodeOps(const std::vector<std::vector<uint32_t>>& prompts) {
    model_->runner().Reset();
    v1::Step prefill;
    v1::Step decode;
    for (size_t i = 0; i < prompts.size(); ++i) {
      AddStart(prefill, i);
      std::vector<uint32_t> blocks;
      for (uint32_t b = 0; b <= prompts[i].size() / 16; ++b) {
        blocks.push_back(static_cast<uint32_t>(16 * i) + b);
      }
      AddTokens(prefill, i, 0, prompts[i], blocks, true);
      AddDecode(decode, i, static_cast<uint32_t>(prompts[i].size()));
    }
    EXPECT_EQ(Run(prefill).outcome(), v1::STEP_OUTCOME_OK);
    recording_->TakeOps();
    EXPECT_EQ(Run(decode).outcome(), v1::STEP_OUTCOME_OK);
    return RecordingBackend::GraphOps(recording_->TakeOps());
  }

  RecordingBackend* recording_ = nullptr;
};

TEST_P(DecodeGraphTest, OpsAreTheSameWithinABucket) {
  if (IsSkipped()) return;
  const auto ops = DecodeOps({{2, 3, 4}, {5}, {6, 7, 8, 9}, {10, 11}});
  ASSERT_GT(ops.size(), model_->spec().layers.size() * 8);
  // Other tokens (other experts), lengths, and one sequence fewer in the bucket of four.
  EXPECT_EQ(ops, DecodeOps({std::vector<uint32_t>(40, 77), {12, 13}, {99}}));
  EXPECT_EQ(ops, DecodeOps({{200}, {201}, std::vector<uint32_t>(17, 9), {202}}));
}

TEST_P(DecodeGraphTest, EachBucketHasItsOwnGraph) {
  if (IsSkipped()) return;
  EXPECT_NE(DecodeOps({{2}, {3}}), DecodeOps({{2}, {3}, {4}}));
}

TEST_P(DecodeGraphTest, PrefillRunsEagerly) {
  if (IsSkipped()) return;
  v1::Step step;
  AddStart(step, 1);
  AddTokens(step, 1, 0, {2, 3, 4}, {0}, true);
  recording_->TakeOps();
  EXPECT_EQ(Run(step).outcome(), v1::STEP_OUTCOME_OK);
  EXPECT_TRUE(RecordingBackend::GraphOps(recording_->TakeOps()).empty());
}

INSTANTIATE_TEST_SUITE_P(Models, DecodeGraphTest,
                         ::testing::Values("llama", "qwen3_moe", "deepseek_v3"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tandem::gpu
