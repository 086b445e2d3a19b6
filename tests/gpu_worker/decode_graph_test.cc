// What a CUDA graph needs: a decode step enqueues the same list of ops, addresses included, for any
// routing, lengths and sequences within a bucket.

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/fakes/recording_backend.h"
#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

struct GraphCase {
  std::string model;
  PlannerOptions::Mode mode = PlannerOptions::Mode::kPlain;
  std::string name;
};

class DecodeGraphTest : public StepRunnerTestBase, public ::testing::WithParamInterface<GraphCase> {
 protected:
  void SetUp() override {
    GoldenOptions options;
    options.wrap = [this](CpuBackend& backend) {
      auto recording = std::make_unique<RecordingBackend>(&backend);
      recording_ = recording.get();
      return recording;
    };
    options.pipeline.mode = GetParam().mode;
    options.pipeline.deferral = limits_;
    options.hot_experts_bytes = hot_experts_bytes_;
    Load(GetParam().model, options);
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
    const std::vector<RecordedOp> ops = recording_->TakeOps();
    for (const RecordedOp& op : ops) {
      if (op.name == "GraphBegin") key_ = op.args;
    }
    return RecordingBackend::GraphOps(ops);
  }

  DeferralLimits limits_{.max_deferred = 1, .max_mass = 1};
  uint64_t hot_experts_bytes_ = 0;
  RecordingBackend* recording_ = nullptr;
  std::string key_;  // of the last decode's graph
};

class LanesGraphTest : public DecodeGraphTest {};
class DeferralGraphTest : public DecodeGraphTest {};
class ResidencyGraphTest : public DecodeGraphTest {
 protected:
  ResidencyGraphTest() { hot_experts_bytes_ = uint64_t{1} << 30; }
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

// Where rows are cut follows measured times, so the key says which steps have to be alike.
TEST_P(LanesGraphTest, StepsOfOneKeyAreOneGraph) {
  if (IsSkipped()) return;
  std::map<std::string, std::vector<RecordedOp>> graphs;
  int again = 0;
  for (uint32_t i = 0; i < 12; ++i) {
    const auto ops = DecodeOps({std::vector<uint32_t>(1 + 3 * i, 77 + i), {12, 13 + i}, {9}, {i}});
    const auto [at, fresh] = graphs.try_emplace(key_, ops);
    again += fresh ? 0 : 1;
    EXPECT_EQ(at->second, ops) << key_;
    EXPECT_EQ(key_.find("second_bucket=0"), std::string::npos) << key_;
  }
  EXPECT_GE(again, 6);
}

// Whether a step defers is device memory: a step that the planner makes plain is the same graph.
TEST_P(DeferralGraphTest, IsTheSameWithAndWithout) {
  if (IsSkipped()) return;
  const auto names = [](const std::vector<RecordedOp>& ops) {
    std::vector<std::string> out;
    for (const RecordedOp& op : ops) out.push_back(op.name);
    return out;
  };
  const auto deferring = names(DecodeOps({{2}, {3}}));
  EXPECT_GT(model_->runner().pipeline().counters().deferred_picks, 0u);
  GoldenOptions options;
  options.wrap = [this](CpuBackend& backend) {
    auto recording = std::make_unique<RecordingBackend>(&backend);
    recording_ = recording.get();
    return recording;
  };
  options.pipeline.mode = PlannerOptions::Mode::kPlain;
  options.pipeline.deferral = limits_;
  Load(GetParam().model, options);
  EXPECT_EQ(deferring, names(DecodeOps({{2}, {3}})));
  EXPECT_EQ(model_->runner().pipeline().counters().deferred_picks, 0u);
}

// Who is resident is device memory: before, during and after experts move, a decode step is the
// same graph.
TEST_P(ResidencyGraphTest, IsTheSameWhoeverIsResident) {
  if (IsSkipped()) return;
  const auto cold = DecodeOps({{2, 3, 4}, {5}, {6, 7}, {10}});
  EXPECT_NE(FormatOps(cold).find("RunResidentExperts"), std::string::npos);
  EXPECT_EQ(model_->hot_experts()->counters().migrations, 0u);
  for (uint32_t i = 0; i < 16; ++i) {
    EXPECT_EQ(cold, DecodeOps({{2 + i, 3, 4}, {5}, {6, 7}, {10 + i}})) << i;
    model_->hot_experts()->WaitForCopies();
  }
  EXPECT_GT(model_->hot_experts()->counters().migrations, 0u);
  EXPECT_GT(model_->runner().pipeline().counters().resident_picks, 0u);
}

std::string CaseName(const ::testing::TestParamInfo<GraphCase>& info) { return info.param.name; }

using Mode = PlannerOptions::Mode;
INSTANTIATE_TEST_SUITE_P(Models, DecodeGraphTest,
                         ::testing::Values(GraphCase{"llama", Mode::kPlain, "llama"},
                                           GraphCase{"qwen3_moe", Mode::kPlain, "qwen3_moe"},
                                           GraphCase{"deepseek_v3", Mode::kPlain, "deepseek_v3"}),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Models, ResidencyGraphTest,
                         ::testing::Values(GraphCase{"qwen3_moe", Mode::kPlain, "plain"},
                                           GraphCase{"deepseek_v3", Mode::kDeferral, "deferral"}),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Models, LanesGraphTest,
                         ::testing::Values(GraphCase{"qwen3_moe", Mode::kPingPong, "pingpong"},
                                           GraphCase{"deepseek_v3", Mode::kBoth, "both"}),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Models, DeferralGraphTest,
                         ::testing::Values(GraphCase{"qwen3_moe", Mode::kDeferral, "qwen3_moe"}),
                         CaseName);

}  // namespace
}  // namespace tandem::gpu
