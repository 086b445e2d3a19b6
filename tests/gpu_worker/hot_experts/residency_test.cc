// Whole models with experts on the device: the same logits, whoever is resident, and counters that
// add up.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

class ResidencyTest : public StepRunnerTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  std::vector<std::vector<float>> Logits(const GoldenOptions& options, int rounds) {
    Load(GetParam(), options);
    std::vector<std::vector<float>> out;
    if (IsSkipped() || HasFatalFailure()) return out;
    const std::vector<uint32_t> prompt{2, 3, 4, 5, 6, 7, 8, 9};
    for (int round = 0; round < rounds; ++round) {
      GoldenDriver driver(*model_);
      driver.Generate({{.id = 1, .prompt = prompt}}, 3, 12);
      if (model_->hot_experts() != nullptr) model_->hot_experts()->WaitForCopies();
      out.clear();
      for (const auto& [position, logits] : driver.trace(1).logits) out.push_back(logits);
    }
    return out;
  }
};

TEST_P(ResidencyTest, LogitsAreThoseOfTheWorkersAlone) {
  const auto want = Logits({.shares = {1, 2}}, 1);
  if (IsSkipped()) return;
  GoldenOptions options{.shares = {1, 2}};
  options.hot_experts_bytes = uint64_t{1} << 30;  // all experts that are ever picked
  const auto got = Logits(options, 4);
  const HotExperts::Counters counters = model_->hot_experts()->counters();
  EXPECT_GT(counters.migrations, 0U);
  EXPECT_GT(model_->runner().pipeline().counters().resident_picks, 0U);
  ASSERT_EQ(got.size(), want.size());
  // Sums of residents and workers are added apart: a few roundings in another order.
  float worst = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    for (size_t j = 0; j < want[i].size(); ++j) {
      worst = std::max(worst, std::fabs(got[i][j] - want[i][j]));
      largest = std::max(largest, std::fabs(want[i][j]));
    }
  }
  EXPECT_LT(worst, 1e-5F * largest);
}

TEST_P(ResidencyTest, AllPicksMayBeResident) {
  GoldenOptions options;
  options.hot_experts_bytes = uint64_t{1} << 30;
  Logits(options, 12);
  if (IsSkipped()) return;
  const PipelineCounters before = model_->runner().pipeline().counters();
  GoldenDriver driver(*model_);
  driver.Generate({{.id = 1, .prompt = {2, 3, 4, 5, 6, 7, 8, 9}}}, 3, 12);
  const PipelineCounters after = model_->runner().pipeline().counters();
  const uint64_t picks =
      (after.routed_rows - before.routed_rows) * static_cast<uint64_t>(model_->spec().moe.top_k);
  EXPECT_EQ(after.resident_picks - before.resident_picks, picks);
}

// A prompt's experts pass through the ring of layer slots, some of them, and nothing changes.
TEST_P(ResidencyTest, StreamedExpertsComputeWhatTheWorkersDo) {
  std::vector<uint32_t> prompt;
  for (uint32_t i = 0; i < 64; ++i) prompt.push_back(2 + i * 7 % 200);
  std::map<uint32_t, std::vector<float>> want;
  for (const int fixed : {0, 1, 3, 1000}) {
    GoldenOptions options{.shares = {1, 2}};
    options.hot_experts_bytes = uint64_t{1} << 30;
    options.stream_prompts = true;
    options.fixed_streamed = fixed;
    Load(GetParam(), options);
    if (IsSkipped() || HasFatalFailure()) return;
    GoldenDriver driver(*model_);
    driver.Generate({{.id = 1, .prompt = prompt}}, 0, 1);
    const auto& logits = driver.trace(1).logits;
    const uint64_t streamed = model_->hot_experts()->counters().streamed_experts;
    const auto layers = static_cast<uint64_t>(model_->runner().decoder().picks().size());
    const auto experts = std::min<uint64_t>(static_cast<uint64_t>(fixed),
                                            static_cast<uint64_t>(model_->spec().moe.experts));
    EXPECT_EQ(streamed, layers * experts);
    if (fixed == 0) want = logits;
    float worst = 0, largest = 0;
    for (const auto& [position, row] : logits) {
      for (size_t i = 0; i < row.size(); ++i) {
        worst = std::max(worst, std::fabs(row[i] - want.at(position)[i]));
        largest = std::max(largest, std::fabs(row[i]));
      }
    }
    EXPECT_LT(worst, 1e-5F * largest) << fixed;
  }
}

TEST_P(ResidencyTest, StreamingAndLanesChangeNothing) {
  std::vector<uint32_t> prompt;
  for (uint32_t i = 0; i < 64; ++i) prompt.push_back(2 + i * 7 % 200);
  std::map<uint32_t, std::vector<float>> want;
  for (const auto mode : {PlannerOptions::Mode::kPlain, PlannerOptions::Mode::kPingPong}) {
    GoldenOptions options;
    options.hot_experts_bytes = uint64_t{1} << 30;
    options.stream_prompts = true;
    options.fixed_streamed = 3;
    options.pipeline.mode = mode;
    Load(GetParam(), options);
    if (IsSkipped() || HasFatalFailure()) return;
    GoldenDriver driver(*model_);
    driver.Generate({{.id = 1, .prompt = prompt}}, 0, 1);
    if (want.empty()) want = driver.trace(1).logits;
    EXPECT_EQ(driver.trace(1).logits, want);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ResidencyTest, ::testing::Values("qwen3_moe", "deepseek_v3"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tandem::gpu
