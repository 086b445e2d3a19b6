// Prefill streaming on simulated machines, in virtual time: the planner's split is nearly as good
// as the best fixed one, found by trying.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>

#include "tests/bench/pipeline_run.h"
#include "tests/testing/temp_dir.h"

namespace tandem::bench {
namespace {

struct Case {
  std::string machine;
  std::string model;
  int rows;
};

class PrefillStreamTest : public ::testing::TestWithParam<Case> {
 protected:
  // The last of some steps, us.
  double StepUs(int fixed, int steps) {
    Scenario scenario;
    scenario.machine = *gpu::FindSimMachine(GetParam().machine);
    scenario.model = *gpu::FindSimModel(GetParam().model);
    scenario.model.layers = 4;
    scenario.prefill_rows = GetParam().rows;
    const PipelineModels models(dir_.path().string());
    const auto dir = models.DirOf(scenario.model);
    EXPECT_TRUE(dir.ok()) << dir.status();
    PolicyOptions policy;
    policy.hot_experts_bytes = uint64_t{100} << 30;
    policy.residents = false;
    policy.stream_prompts = true;
    policy.fixed_streamed = fixed;
    auto run = PipelineRun::Create(scenario, policy, *dir);
    EXPECT_TRUE(run.ok()) << run.status();
    double us = 0;
    for (int i = 0; i < steps; ++i) {
      const auto sample = (*run)->Step();
      EXPECT_TRUE(sample.ok()) << sample.status();
      us = sample->virtual_us;
      streamed_ = (*run)->model().hot_experts()->counters().streamed_experts;
    }
    return us;
  }

  testing::TempDir dir_;
  uint64_t streamed_ = 0;
};

TEST_P(PrefillStreamTest, PlannerIsNearlyAsFastAsTheBestFixedSplit) {
  const int experts = 128;
  double best = StepUs(0, 3);
  const double without = best;
  for (int k = 8; k <= experts; k += 8) best = std::min(best, StepUs(k, 3));
  const double planned = StepUs(-1, 50);
  RecordProperty("gain_percent", static_cast<int>(100 * (without / planned - 1)));
  EXPECT_LE(planned, best / 0.9) << "without streaming " << without;
  EXPECT_LE(planned, without * 1.02);
  EXPECT_TRUE(streamed_ > 0 || best > 0.9 * without);
}

INSTANTIATE_TEST_SUITE_P(Machines, PrefillStreamTest,
                         ::testing::Values(Case{"rtx4090-2s", "qwen3-30b-int4", 2048},
                                           Case{"rtx5090-1s", "qwen3-30b-int4", 256},
                                           Case{"h200-2s", "qwen3-235b-int4", 128}),
                         [](const auto& info) { return "on_" + std::to_string(info.index); });

}  // namespace
}  // namespace tandem::bench
