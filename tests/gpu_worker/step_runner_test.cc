// The step protocol on a real model: finishing, deactivation, failure, log-probabilities, and steps
// that break the protocol at random.

#include "gpu_worker/step_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

class StepRunnerTest : public StepRunnerTestBase {
 protected:
  void SetUp() override { Load("qwen3_moe", {}); }

  // Prompt {2, 3, 4} in block `block`; samples its first token.
  v1::Step Prompt(uint64_t id, uint32_t block) {
    v1::Step step;
    AddStart(step, id);
    AddTokens(step, id, 0, {2, 3, 4}, {block}, true);
    return step;
  }
  v1::Step Decode(uint64_t id, uint32_t position) {
    v1::Step step;
    AddDecode(step, id, position);
    return step;
  }
  uint32_t Token(const v1::StepResult& result, int sequence = 0) {
    EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
    if (result.sequences_size() <= sequence || result.sequences(sequence).token_ids_size() != 1) {
      ADD_FAILURE() << result.ShortDebugString();
      return 0;
    }
    return result.sequences(sequence).token_ids(0);
  }
};

TEST_F(StepRunnerTest, StopTokenEndsTheSequenceAndLaterStepsComputeNothing) {
  const uint32_t first = Token(Run(Prompt(1, 0)));
  const uint32_t second = Token(Run(Decode(1, 3)));
  ASSERT_NE(first, second);
  v1::Step step = Prompt(2, 1);
  step.mutable_starts(0)->mutable_stopping()->add_stop_token_ids(second);
  EXPECT_EQ(Token(Run(step)), first);
  const v1::StepResult stopped = Run(Decode(2, 3));
  EXPECT_EQ(Token(stopped), second);
  EXPECT_EQ(stopped.sequences(0).finish(), v1::WORKER_FINISH_STOP_TOKEN);
  const v1::StepResult late = Run(Decode(2, 4));
  EXPECT_EQ(late.outcome(), v1::STEP_OUTCOME_OK);
  EXPECT_EQ(late.sequences(0).finish(), v1::WORKER_FINISH_INACTIVE);
  EXPECT_EQ(late.sequences(0).token_ids_size(), 0);
  EXPECT_EQ(late.timing().rows(), 0u);
}

TEST_F(StepRunnerTest, MinTokensBansStopTokens) {
  const uint32_t first = Token(Run(Prompt(1, 0)));
  v1::Step step = Prompt(2, 1);
  step.mutable_starts(0)->mutable_stopping()->add_stop_token_ids(first);
  step.mutable_starts(0)->mutable_stopping()->set_min_tokens(1);
  const v1::StepResult result = Run(step);
  EXPECT_NE(Token(result), first);
  EXPECT_EQ(result.sequences(0).finish(), v1::WORKER_FINISH_NONE);
}

TEST_F(StepRunnerTest, MaxTokensEndsTheSequence) {
  v1::Step step = Prompt(1, 0);
  step.mutable_starts(0)->mutable_stopping()->set_max_tokens(2);
  EXPECT_EQ(Run(step).sequences(0).finish(), v1::WORKER_FINISH_NONE);
  EXPECT_EQ(Run(Decode(1, 3)).sequences(0).finish(), v1::WORKER_FINISH_MAX_TOKENS);
  EXPECT_EQ(Run(Decode(1, 4)).sequences(0).finish(), v1::WORKER_FINISH_INACTIVE);
}

TEST_F(StepRunnerTest, InvalidStepChangesNothing) {
  const uint32_t first = Token(Run(Prompt(1, 0)));
  v1::Step bad = Decode(1, 3);
  AddStart(bad, 2);
  bad.add_release_sequence_ids(1);
  const v1::StepResult refused = Run(bad);
  EXPECT_EQ(refused.outcome(), v1::STEP_OUTCOME_INVALID);
  EXPECT_FALSE(refused.error().empty());
  EXPECT_EQ(refused.sequences_size(), 0);
  // Sequence 1 is still there, sequence 2 is not.
  const uint32_t second = Token(Run(Decode(1, 3)));
  model_->runner().Reset();
  EXPECT_EQ(Token(Run(Prompt(1, 0))), first);
  EXPECT_EQ(Token(Run(Decode(1, 3))), second);
  EXPECT_EQ(Run(Decode(2, 0)).outcome(), v1::STEP_OUTCOME_INVALID);
}

TEST_F(StepRunnerTest, StepOfAnotherEpochIsUnavailable) {
  model_->runner().set_epoch(5);
  v1::Step step = Prompt(1, 0);
  step.set_epoch(4);
  const v1::StepResult result = Run(step);
  EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_UNAVAILABLE);
  EXPECT_EQ(result.epoch(), 5u);
  EXPECT_EQ(model_->runner().table().used(), 0);
}

TEST_F(StepRunnerTest, LostExpertWorkerFailsTheStepAndItsSequencesOnly) {
  EXPECT_EQ(Run(Prompt(1, 0)).outcome(), v1::STEP_OUTCOME_OK);
  const uint32_t other = Token(Run(Prompt(2, 1)));
  ExpertLink* const link = model_->link();
  model_->runner().set_link(nullptr);
  const v1::StepResult lost = Run(Decode(1, 3));
  EXPECT_EQ(lost.outcome(), v1::STEP_OUTCOME_UNAVAILABLE);
  EXPECT_EQ(lost.sequences_size(), 0);
  model_->runner().set_link(link);
  // A step that was already on its way: the lost one computes nothing, the other goes on.
  v1::Step next = Decode(1, 4);
  AddDecode(next, 2, 3);
  const v1::StepResult result = Run(next);
  EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
  EXPECT_EQ(result.sequences(0).finish(), v1::WORKER_FINISH_INACTIVE);
  EXPECT_EQ(result.sequences(1).token_ids_size(), 1);
  EXPECT_LT(other, 256u);
}

TEST_F(StepRunnerTest, CopiedBlocksHoldTheSameKeys) {
  Token(Run(Prompt(1, 0)));
  const uint32_t expected = Token(Run(Decode(1, 3)));
  const std::vector<float> unused;
  v1::Step step;
  v1::BlockCopy& copy = *step.add_block_copies();
  copy.set_source_block(0);
  copy.set_target_block(5);
  AddStart(step, 2);
  // The prefix {2, 3, 4} comes from the copy; the fourth token is what sequence 1 sampled first.
  model_->runner().Reset();
  const uint32_t first = Token(Run(Prompt(1, 0)));
  AddTokens(step, 2, 3, {first}, {5}, true);
  EXPECT_EQ(Token(Run(step)), expected);
}

TEST_F(StepRunnerTest, LogprobsAreThoseOfTheLogits) {
  v1::Step step = Prompt(1, 0);
  step.mutable_starts(0)->mutable_sampling()->set_top_logprobs(3);
  step.mutable_starts(0)->set_prompt_logprobs(2);
  const v1::StepResult result = Run(step);
  ASSERT_EQ(result.sequences(0).logprobs_size(), 1);
  const v1::TokenLogprobs& sampled = result.sequences(0).logprobs(0);
  EXPECT_EQ(sampled.token_id(), result.sequences(0).token_ids(0));
  EXPECT_EQ(sampled.rank(), 1u);  // greedy
  ASSERT_EQ(sampled.top_ids_size(), 3);
  EXPECT_EQ(sampled.top_ids(0), sampled.token_id());
  EXPECT_EQ(sampled.top_logprobs(0), sampled.logprob());
  EXPECT_GE(sampled.top_logprobs(0), sampled.top_logprobs(1));
  EXPECT_LT(sampled.logprob(), 0);
  // Positions 1 and 2 of the prompt.
  ASSERT_EQ(result.sequences(0).prompt_logprobs_size(), 2);
  EXPECT_EQ(result.sequences(0).prompt_logprobs(0).token_id(), 3u);
  EXPECT_EQ(result.sequences(0).prompt_logprobs(1).token_id(), 4u);
  EXPECT_EQ(result.sequences(0).prompt_logprobs(1).top_ids_size(), 2);
}

TEST_F(StepRunnerTest, PromptLogprobsDoNotDependOnChunks) {
  std::vector<uint32_t> prompt;
  for (uint32_t i = 0; i < 23; ++i) prompt.push_back(2 + i * 7 % 250);
  v1::Step whole;
  AddStart(whole, 1).set_prompt_logprobs(1);
  AddTokens(whole, 1, 0, prompt, {0, 1}, true);
  const v1::StepResult expected = Run(whole);
  ASSERT_EQ(expected.sequences(0).prompt_logprobs_size(), 22);
  int seen = 0;
  for (uint32_t begin = 0; begin < 23; begin += 8) {
    const uint32_t end = std::min(23u, begin + 8);
    v1::Step step;
    if (begin == 0) AddStart(step, 2).set_prompt_logprobs(1);
    const std::vector<uint32_t> part(prompt.begin() + begin, prompt.begin() + end);
    v1::SequenceStep& sequence = AddTokens(step, 2, begin, part, {}, end == 23);
    if (begin == 0) {
      sequence.add_block_appends()->add_block_ids(2);
      sequence.mutable_block_appends(0)->add_block_ids(3);
    }
    if (end < 23) sequence.set_next_prompt_id(prompt[end]);
    const v1::StepResult result = Run(step);
    ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
    for (const v1::TokenLogprobs& logprobs : result.sequences(0).prompt_logprobs()) {
      const v1::TokenLogprobs& want = expected.sequences(0).prompt_logprobs(seen++);
      EXPECT_EQ(logprobs.SerializeAsString(), want.SerializeAsString()) << "position " << seen;
    }
  }
  EXPECT_EQ(seen, 22);
}

TEST_F(StepRunnerTest, LogitBiasAndPenaltiesReachTheSampler) {
  v1::Step biased = Prompt(1, 0);
  (*biased.mutable_starts(0)->mutable_sampling()->mutable_logit_bias())[77] = 100;
  EXPECT_EQ(Token(Run(biased)), 77u);
  // Presence penalty: what was sampled is not sampled again.
  v1::Step penalized = Prompt(2, 1);
  penalized.mutable_starts(0)->mutable_sampling()->set_presence_penalty(1000);
  std::vector<uint32_t> tokens = {Token(Run(penalized))};
  for (uint32_t i = 0; i < 6; ++i) {
    tokens.push_back(Token(Run(Decode(2, 3 + i))));
  }
  std::sort(tokens.begin(), tokens.end());
  EXPECT_EQ(std::unique(tokens.begin(), tokens.end()), tokens.end());
  // The same for tokens of before a preemption.
  v1::Step resumed = Prompt(3, 2);
  resumed.mutable_starts(0)->mutable_sampling()->set_presence_penalty(1000);
  const uint32_t plain = Token(Run(Prompt(4, 3)));
  resumed.mutable_starts(0)->add_penalty_output_ids(plain);
  EXPECT_NE(Token(Run(resumed)), plain);
}

TEST_F(StepRunnerTest, SeededDrawsAreUnaffectedByNeighbours) {
  const auto sampled = [&](bool with_neighbour) {
    model_->runner().Reset();
    v1::Step step = Prompt(1, 0);
    v1::Sampling& sampling = *step.mutable_starts(0)->mutable_sampling();
    sampling.set_temperature(2);
    sampling.set_seed(123);
    if (with_neighbour) {
      AddStart(step, 2).mutable_sampling()->set_temperature(1);
      AddTokens(step, 2, 0, {9, 8}, {1}, true);
    }
    std::vector<uint32_t> tokens = {Token(Run(step))};
    for (uint32_t i = 0; i < 8; ++i) {
      v1::Step next = Decode(1, 3 + i);
      if (with_neighbour) AddDecode(next, 2, 2 + i);
      tokens.push_back(Token(Run(next)));
    }
    return tokens;
  };
  EXPECT_EQ(sampled(false), sampled(true));
}

// An embedding that is no number stands for any overflow: only who used it dies.
TEST_F(StepRunnerTest, NonFiniteNumbersKillTheirSequenceAlone) {
  const uint32_t expected = Token(Run(Prompt(1, 0)));
  const TensorView& table = model_->weights().embedding;
  ASSERT_EQ(table.dtype, DType::kBF16);
  table.As<uint16_t>()[200 * model_->spec().hidden] = 0x7FC0;
  v1::Step step = Prompt(2, 1);
  AddStart(step, 3);
  AddTokens(step, 3, 0, {2, 200, 4}, {2}, true);
  AddStart(step, 4);  // does not sample: its router tells
  AddTokens(step, 4, 0, {200, 4}, {3}, false);
  const v1::StepResult result = Run(step);
  EXPECT_EQ(Token(result, 0), expected);
  EXPECT_EQ(result.sequences(0).finish(), v1::WORKER_FINISH_NONE);
  for (const int dead : {1, 2}) {
    EXPECT_EQ(result.sequences(dead).finish(), v1::WORKER_FINISH_NUMERIC_ERROR);
    EXPECT_EQ(result.sequences(dead).token_ids_size(), 0);
  }
  v1::Step next;
  AddDecode(next, 2, 3);
  AddDecode(next, 3, 3);
  const v1::StepResult after = Run(next);
  EXPECT_EQ(after.outcome(), v1::STEP_OUTCOME_OK) << after.error();
  EXPECT_EQ(after.sequences(1).finish(), v1::WORKER_FINISH_INACTIVE);
}

// Whatever a step holds, it is answered, and what was accepted stays consistent.
TEST_F(StepRunnerTest, RandomStepsAreAnsweredAndNeverCrash) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto pick = [&](uint32_t bound) { return random() % bound; };
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    v1::Step step;
    step.set_step_id(static_cast<uint64_t>(i));
    if (pick(30) == 0) step.set_epoch(pick(3));
    for (uint32_t n = pick(3); n > 0; --n) step.add_release_sequence_ids(pick(6));
    for (uint32_t n = pick(2); n > 0; --n) {
      v1::SequenceStart& start = AddStart(step, pick(6));
      start.mutable_stopping()->set_max_tokens(pick(4));
      start.mutable_sampling()->set_temperature(static_cast<float>(pick(3)));
      if (pick(4) == 0) start.mutable_sampling()->set_presence_penalty(0.5f);
      if (pick(8) == 0) start.mutable_stopping()->add_stop_token_ids(pick(300));
      start.set_prompt_logprobs(static_cast<int32_t>(pick(4)) - 1);
    }
    for (uint32_t n = pick(3); n > 0; --n) {
      const uint64_t id = pick(6);
      const int slot = model_->runner().table().Find(id);
      const uint32_t next = slot < 0 ? 0 : model_->runner().table().at(slot).next_position;
      const uint32_t position = pick(10) == 0 ? pick(300) : next;
      std::vector<uint32_t> blocks;
      for (uint32_t k = pick(3); k > 0; --k) blocks.push_back(pick(66));
      if (pick(2) == 0) {
        AddDecode(step, id, position, blocks);
      } else {
        std::vector<uint32_t> tokens;
        for (uint32_t k = pick(12); k > 0; --k) tokens.push_back(pick(257));
        AddTokens(step, id, position, tokens, blocks, pick(2) == 0);
      }
    }
    if (pick(6) == 0) {
      v1::BlockCopy& copy = *step.add_block_copies();
      copy.set_source_block(pick(66));
      copy.set_target_block(pick(66));
    }
    const v1::StepResult result = Run(step);
    ASSERT_EQ(result.step_id(), step.step_id());
    if (result.outcome() == v1::STEP_OUTCOME_OK) {
      ++accepted;
      ASSERT_EQ(result.sequences_size(), step.sequences_size());
    } else {
      ++refused;
      ASSERT_EQ(result.sequences_size(), 0);
      ASSERT_FALSE(result.error().empty());
    }
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace tandem::gpu
