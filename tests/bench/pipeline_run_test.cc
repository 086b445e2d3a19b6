// Every policy on a simulated machine in virtual time, where times are exact: against the bound of
// the step's dependency graph, which plain steps and deferral reach.

#include "tests/bench/pipeline_run.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/testing/temp_dir.h"

namespace tandem::bench {
namespace {

// The first layers of a large model: enough for a pipeline to fill.
Scenario Decode(int streams) {
  Scenario scenario{.name = "decode",
                    .machine = *gpu::FindSimMachine("rtx4090-2s"),
                    .model = *gpu::FindSimModel("qwen3-235b-int4"),
                    .streams = streams,
                    .context_tokens = 2048};
  scenario.model.layers = 6;
  return scenario;
}

class PipelineRunTest : public ::testing::Test {
 protected:
  // A step after the warm-up, without time stamps.
  StepSample SampleOf(const Scenario& scenario, PipelinePolicy policy) {
    StepSample sample;
    const auto dir = models_.DirOf(scenario.model);
    EXPECT_TRUE(dir.ok()) << dir.status();
    if (!dir.ok()) return sample;
    const int measure_every = policy == PipelinePolicy::kPlanner ? 1 : 1 << 20;
    auto run = PipelineRun::Create(scenario,
                                   {.policy = policy,
                                    .deferral = {.max_deferred = 3, .max_mass = 1},
                                    .measure_every = measure_every},
                                   *dir);
    EXPECT_TRUE(run.ok()) << run.status();
    if (!run.ok()) return sample;
    EXPECT_TRUE((*run)->WarmUp().ok());
    const auto step = (*run)->Step();
    EXPECT_TRUE(step.ok()) << step.status();
    if (step.ok()) sample = *step;
    return sample;
  }
  static double BoundUs(const StepSample& sample) {
    return static_cast<double>(BoundNs(sample.costs)) * 1e-3;
  }

  const testing::TempDir dir_;
  const PipelineModels models_{dir_.path().string()};
};

TEST_F(PipelineRunTest, OneLaneReachesItsBound) {
  for (const int streams : {1, 4}) {
    const StepSample plain = SampleOf(Decode(streams), PipelinePolicy::kPlain);
    EXPECT_STREQ(plain.chosen, "plain");
    EXPECT_DOUBLE_EQ(plain.virtual_us, BoundUs(plain)) << streams;
    const StepSample deferral = SampleOf(Decode(streams), PipelinePolicy::kDeferral);
    EXPECT_STREQ(deferral.chosen, "deferral");
    EXPECT_DOUBLE_EQ(deferral.virtual_us, BoundUs(deferral)) << streams;
    EXPECT_LT(deferral.virtual_us, plain.virtual_us) << streams;
    EXPECT_LT(deferral.experts_stall_us, plain.experts_stall_us) << streams;
  }
}

TEST_F(PipelineRunTest, TwoLanesComeNearTheirs) {
  const StepSample plain = SampleOf(Decode(4), PipelinePolicy::kPlain);
  for (const PipelinePolicy policy : {PipelinePolicy::kPingPong, PipelinePolicy::kBoth}) {
    const StepSample sample = SampleOf(Decode(4), policy);
    EXPECT_STREQ(sample.chosen, NameOf(policy));
    ASSERT_EQ(sample.costs.lanes.size(), 2u);
    EXPECT_GE(sample.virtual_us, BoundUs(sample));
    EXPECT_LT(0.9 * sample.virtual_us, BoundUs(sample));
    EXPECT_LT(sample.device_stall_us, plain.device_stall_us);
  }
}

TEST_F(PipelineRunTest, PlannerIsNoSlowerThanPlain) {
  for (const int streams : {1, 2}) {
    const StepSample plain = SampleOf(Decode(streams), PipelinePolicy::kPlain);
    const StepSample planned = SampleOf(Decode(streams), PipelinePolicy::kPlanner);
    EXPECT_LT(planned.virtual_us, 1.02 * plain.virtual_us) << planned.chosen;
  }
}

TEST_F(PipelineRunTest, PrefillIsOneStepOfAllItsRows) {
  Scenario scenario = Decode(1);
  scenario.model.layers = 2;
  scenario.prefill_rows = 64;
  const StepSample sample = SampleOf(scenario, PipelinePolicy::kPlain);
  EXPECT_DOUBLE_EQ(sample.virtual_us, BoundUs(sample));
  ASSERT_EQ(sample.costs.lanes.size(), 1u);
  EXPECT_EQ(sample.costs.lanes[0].size(), 2u);
}

TEST_F(PipelineRunTest, MachineIsBroughtToTheScenariosRatio) {
  Scenario scenario = Decode(1);
  scenario.device_to_experts = 28.0 / 74;
  const auto machine = MachineOf(scenario, *models_.DirOf(scenario.model));
  ASSERT_TRUE(machine.ok()) << machine.status();
  scenario.machine = *machine;
  const StepSample sample = SampleOf(scenario, PipelinePolicy::kPlain);
  EXPECT_NEAR(
      static_cast<double>(DeviceNs(sample.costs)) / static_cast<double>(ExpertsNs(sample.costs)),
      28.0 / 74, 0.005);
}

}  // namespace
}  // namespace tandem::bench
