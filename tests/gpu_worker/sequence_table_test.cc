#include "gpu_worker/sequence_table.h"

#include <gtest/gtest.h>

#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

constexpr SequenceLimits kLimits{.max_sequences = 2,
                                 .max_context = 64,
                                 .max_step_rows = 16,
                                 .vocab = 100,
                                 .block_tokens = 16,
                                 .block_count = 8};

v1::SequenceStart Start(uint64_t id) {
  v1::Step step;
  return AddStart(step, id);
}

TEST(SequenceTable, FindsWhatWasStartedUntilReleased) {
  SequenceTable table(kLimits);
  EXPECT_EQ(table.Find(7), -1);
  const int slot = table.Start(Start(7));
  EXPECT_EQ(table.Find(7), slot);
  EXPECT_EQ(table.used(), 1);
  table.Release(8);  // unknown: ignored
  EXPECT_EQ(table.used(), 1);
  table.Release(7);
  EXPECT_EQ(table.Find(7), -1);
  EXPECT_EQ(table.used(), 0);
}

TEST(SequenceTable, ReusesSlotsWithoutOldState) {
  SequenceTable table(kLimits);
  v1::SequenceStart first = Start(1);
  first.mutable_stopping()->add_stop_token_ids(3);
  first.mutable_stopping()->set_max_tokens(5);
  (*first.mutable_sampling()->mutable_logit_bias())[4] = 1;
  const int slot = table.Start(first);
  v1::Step step;
  table.AppendBlocks(slot, AddTokens(step, 1, 0, {1}, {2, 3}, true));
  table.Advance(slot, 0, 1);
  table.TakeToken(slot, 9);
  table.Release(1);
  const int again = table.Start(Start(2));
  ASSERT_EQ(again, slot);
  const Sequence& sequence = table.at(again);
  EXPECT_TRUE(sequence.blocks.empty());
  EXPECT_TRUE(sequence.stop_ids.empty());
  EXPECT_TRUE(sequence.bias_ids.empty());
  EXPECT_FALSE(sequence.started);
  EXPECT_EQ(sequence.last_token, -1);
  EXPECT_EQ(sequence.produced, 0u);
}

TEST(SequenceTable, StopsAtAStopTokenAndAtMaxTokens) {
  SequenceTable table(kLimits);
  v1::SequenceStart start = Start(1);
  start.mutable_stopping()->add_stop_token_ids(50);
  start.mutable_stopping()->add_stop_token_ids(20);
  start.mutable_stopping()->set_max_tokens(3);
  const int a = table.Start(start);
  start.set_sequence_id(2);
  const int b = table.Start(start);
  EXPECT_EQ(table.TakeToken(a, 1), v1::WORKER_FINISH_NONE);
  EXPECT_EQ(table.TakeToken(a, 20), v1::WORKER_FINISH_STOP_TOKEN);
  EXPECT_EQ(table.at(a).state, SequenceState::kInactive);
  EXPECT_EQ(table.TakeToken(b, 1), v1::WORKER_FINISH_NONE);
  EXPECT_EQ(table.TakeToken(b, 2), v1::WORKER_FINISH_NONE);
  EXPECT_EQ(table.at(b).state, SequenceState::kActive);
  EXPECT_EQ(table.TakeToken(b, 3), v1::WORKER_FINISH_MAX_TOKENS);
  EXPECT_EQ(table.at(b).state, SequenceState::kInactive);
}

TEST(SequenceTable, BansStopIdsUntilMinTokensAreOut) {
  SequenceTable table(kLimits);
  v1::SequenceStart start = Start(1);
  start.mutable_stopping()->set_min_tokens(2);
  const int slot = table.Start(start);
  EXPECT_TRUE(table.at(slot).bans_stop_ids());
  table.TakeToken(slot, 1);
  EXPECT_TRUE(table.at(slot).bans_stop_ids());
  table.TakeToken(slot, 1);
  EXPECT_FALSE(table.at(slot).bans_stop_ids());
}

}  // namespace
}  // namespace tandem::gpu
