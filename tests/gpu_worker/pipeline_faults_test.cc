// An expert worker dies at every single call of a step: the step ends UNAVAILABLE, nothing hangs,
// and what runs afterwards is what it would have been without.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/faulty_expert_link.h"
#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

using Mode = PlannerOptions::Mode;

class PipelineFaultsTest : public StepRunnerTestBase, public ::testing::WithParamInterface<Mode> {
 protected:
  void SetUp() override {
    GoldenOptions options;
    options.pipeline.mode = GetParam();
    options.pipeline.deferral = {.max_deferred = 1, .max_mass = 1};
    Load("qwen3_moe", options);
    if (IsSkipped()) return;
    link_ = std::make_unique<FaultyExpertLink>(*model_->link());
    model_->runner().set_link(link_.get());
  }

  v1::Step Prefill(uint64_t first_id) const {
    v1::Step step;
    for (uint64_t i = 0; i < 3; ++i) {
      AddStart(step, first_id + i).mutable_sampling()->set_top_logprobs(8);
      const auto block = static_cast<uint32_t>(4 * i);
      AddTokens(step, first_id + i, 0, {2, static_cast<uint32_t>(5 + i), 7}, {block}, true);
    }
    return step;
  }
  v1::Step Decode(uint64_t first_id, uint32_t position) const {
    v1::Step step;
    for (uint64_t i = 0; i < 3; ++i) AddDecode(step, first_id + i, position);
    return step;
  }
  // Prefill and two decodes of sequences that start anew.
  std::string Generate(uint64_t first_id) {
    std::string text;
    for (const v1::Step& step : {Prefill(first_id), Decode(first_id, 3), Decode(first_id, 4)}) {
      v1::StepResult result = Run(step);
      EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
      for (auto& sequence : *result.mutable_sequences()) {
        sequence.set_sequence_id(sequence.sequence_id() - first_id);
        text += sequence.SerializeAsString();
      }
    }
    v1::Step release;
    for (uint64_t i = 0; i < 3; ++i) release.add_release_sequence_ids(first_id + i);
    EXPECT_EQ(Run(release).outcome(), v1::STEP_OUTCOME_OK);
    return text;
  }

  std::unique_ptr<FaultyExpertLink> link_;
};

TEST_P(PipelineFaultsTest, DeathAtAnyCallFailsItsStepAlone) {
  if (IsSkipped()) return;
  const std::string want = Generate(1);
  uint64_t id = 100;
  for (const bool in_decode : {false, true}) {
    EXPECT_EQ(Run(Prefill(id)).outcome(), v1::STEP_OUTCOME_OK);
    const int64_t calls = link_->calls();
    ASSERT_GE(calls, 2 * static_cast<int64_t>(model_->runner().decoder().picks().size()));
    model_->runner().Reset();
    for (int64_t call = 0; call < calls; ++call, id += 10) {
      if (in_decode) {
        EXPECT_EQ(Run(Prefill(id)).outcome(), v1::STEP_OUTCOME_OK);
      }
      link_->DieAt(call);
      const v1::StepResult failed = Run(in_decode ? Decode(id, 3) : Prefill(id));
      EXPECT_EQ(failed.outcome(), v1::STEP_OUTCOME_UNAVAILABLE) << "call " << call;
      EXPECT_EQ(failed.sequences_size(), 0);
      // Until a new worker is there, steps fail at once.
      model_->runner().Reset();
      EXPECT_EQ(Run(Prefill(id + 5)).outcome(), v1::STEP_OUTCOME_UNAVAILABLE);
      link_->Heal();
      model_->runner().Reset();
      EXPECT_EQ(Generate(id + 5), want) << "after call " << call;
    }
  }
}

std::string ModeName(const ::testing::TestParamInfo<Mode>& info) {
  switch (info.param) {
    case Mode::kDeferral:
      return "Deferral";
    case Mode::kPingPong:
      return "PingPong";
    case Mode::kBoth:
      return "Both";
    default:
      return "Plain";
  }
}
INSTANTIATE_TEST_SUITE_P(Modes, PipelineFaultsTest,
                         ::testing::Values(Mode::kPlain, Mode::kDeferral, Mode::kPingPong,
                                           Mode::kBoth),
                         ModeName);

}  // namespace
}  // namespace tandem::gpu
