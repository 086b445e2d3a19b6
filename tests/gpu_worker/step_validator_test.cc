#include "gpu_worker/step_validator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

using ::testing::HasSubstr;

constexpr SequenceLimits kLimits{.max_sequences = 3,
                                 .max_context = 64,
                                 .max_step_rows = 16,
                                 .vocab = 100,
                                 .block_tokens = 16,
                                 .block_count = 8,
                                 .max_logprobs = 5};

class StepValidatorTest : public ::testing::Test {
 protected:
  StepValidatorTest() : table_(kLimits), validator_(kLimits) {
    v1::Step step;
    const int slot = table_.Start(AddStart(step, 1));
    table_.AppendBlocks(slot, AddTokens(step, 1, 0, {1, 2}, {0}, true));
    table_.Advance(slot, 0, 2);
    table_.TakeToken(slot, 5);
  }
  void ExpectOk(const v1::Step& step) {
    const absl::Status status = validator_.Check(step, table_);
    EXPECT_TRUE(status.ok()) << status;
  }
  void ExpectRefused(const v1::Step& step, const std::string& what) {
    const absl::Status status = validator_.Check(step, table_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  }

  SequenceTable table_;
  StepValidator validator_;
  v1::Step step_;
};

TEST_F(StepValidatorTest, AcceptsAnEmptyStep) { ExpectOk(step_); }

TEST_F(StepValidatorTest, AcceptsReleaseStartAndSequencesTogether) {
  step_.add_release_sequence_ids(1);
  step_.add_release_sequence_ids(99);  // unknown: no error
  AddStart(step_, 1);
  AddStart(step_, 2);
  AddTokens(step_, 1, 0, {1}, {3}, true);
  AddTokens(step_, 2, 16, {1}, {3, 4}, false);  // a cached prefix of one block
  ExpectOk(step_);
}

TEST_F(StepValidatorTest, RefusesUnknownSequences) {
  AddDecode(step_, 9, 0);
  ExpectRefused(step_, "is unknown");
}

TEST_F(StepValidatorTest, RefusesSequencesReleasedInTheSameStep) {
  step_.add_release_sequence_ids(1);
  AddDecode(step_, 1, 2);
  ExpectRefused(step_, "is unknown");
}

TEST_F(StepValidatorTest, RefusesDuplicates) {
  AddDecode(step_, 1, 2);
  AddDecode(step_, 1, 2);
  ExpectRefused(step_, "twice in the step");
  v1::Step started;
  AddStart(started, 1);
  ExpectRefused(started, "started twice");
  v1::Step both;
  AddStart(both, 2);
  AddStart(both, 2);
  ExpectRefused(both, "started twice");
}

TEST_F(StepValidatorTest, RefusesPositionsThatDoNotFollow) {
  AddDecode(step_, 1, 3);
  ExpectRefused(step_, "2 comes next");
  v1::Step behind;
  AddDecode(behind, 1, 1);
  ExpectRefused(behind, "2 comes next");
}

TEST_F(StepValidatorTest, RefusesMoreSequencesThanFit) {
  for (const uint64_t id : {2, 3, 4}) AddStart(step_, id);
  ExpectRefused(step_, "at most 3 fit");
}

TEST_F(StepValidatorTest, RefusesTooManyRows) {
  AddStart(step_, 2);
  AddTokens(step_, 2, 0, std::vector<uint32_t>(16, 1), {1}, true);
  ExpectOk(step_);
  AddDecode(step_, 1, 2);
  ExpectRefused(step_, "17 rows");
}

TEST_F(StepValidatorTest, RefusesTokensOutsideTheVocabulary) {
  AddStart(step_, 2);
  AddTokens(step_, 2, 0, {1, 100}, {1}, true);
  ExpectRefused(step_, "outside the vocabulary");
  v1::Step next;
  AddStart(next, 2);
  AddTokens(next, 2, 0, {1}, {1}, false).set_next_prompt_id(100);
  ExpectRefused(next, "next_prompt_id");
}

TEST_F(StepValidatorTest, RefusesBlocksOutOfRangeOrMissing) {
  AddDecode(step_, 1, 2, {8});
  ExpectRefused(step_, "block 8 is out of range");
  v1::Step missing;
  AddStart(missing, 2);
  AddTokens(missing, 2, 16, {1}, {1}, true);
  ExpectRefused(missing, "has 1 blocks, position 17 needs 2");
  v1::Step many;
  AddStart(many, 2);
  AddTokens(many, 2, 0, {1}, {1, 2, 3, 4, 5}, true);
  ExpectRefused(many, "at most 4");
  v1::Step group;
  AddDecode(group, 1, 2).add_block_appends()->set_cache_group(1);
  ExpectRefused(group, "cache group");
}

TEST_F(StepValidatorTest, RefusesPositionsBeyondTheContext) {
  AddStart(step_, 2);
  AddTokens(step_, 2, 63, {1, 1}, {1, 2, 3, 4}, true);
  ExpectRefused(step_, "the context holds 64");
}

TEST_F(StepValidatorTest, RefusesEmptyInputs) {
  AddStart(step_, 2);
  AddTokens(step_, 2, 0, {}, {1}, true);
  ExpectRefused(step_, "has no tokens");
  v1::Step none;
  v1::SequenceStep& sequence = *none.add_sequences();
  sequence.set_sequence_id(1);
  sequence.set_start_position(2);
  ExpectRefused(none, "neither tokens nor last_sampled");
  v1::Step unsampled;
  AddStart(unsampled, 2);
  AddDecode(unsampled, 2, 0, {1});
  ExpectRefused(unsampled, "not sampled a token yet");
}

TEST_F(StepValidatorTest, RefusesWhatIsNotSupported) {
  AddDecode(step_, 1, 2).set_masked(true);
  ExpectRefused(step_, "masks");
  v1::Step slot;
  AddDecode(slot, 1, 2).set_state_slot(1);
  ExpectRefused(slot, "recurrent state");
}

TEST_F(StepValidatorTest, RefusesBadCopies) {
  v1::BlockCopy& copy = *step_.add_block_copies();
  copy.set_source_block(7);
  copy.set_target_block(8);
  ExpectRefused(step_, "out of range");
  copy.set_target_block(1);
  ExpectOk(step_);
}

TEST_F(StepValidatorTest, RefusesSamplingThatIsNoNumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto expect_refused = [&](const auto& change, const std::string& what) {
    v1::Step step;
    change(*AddStart(step, 2).mutable_sampling());
    ExpectRefused(step, what);
  };
  expect_refused([&](v1::Sampling& s) { s.set_temperature(nan); }, "temperature");
  expect_refused([&](v1::Sampling& s) { s.set_temperature(-1); }, "temperature");
  expect_refused([&](v1::Sampling& s) { s.set_top_p(0); }, "top_p");
  expect_refused([&](v1::Sampling& s) { s.set_top_p(nan); }, "top_p");
  expect_refused([&](v1::Sampling& s) { s.set_min_p(1.5); }, "min_p");
  expect_refused([&](v1::Sampling& s) { s.set_repetition_penalty(0); }, "repetition_penalty");
  expect_refused([&](v1::Sampling& s) { s.set_presence_penalty(nan); }, "penalties");
  expect_refused([&](v1::Sampling& s) { s.set_top_logprobs(6); }, "top_logprobs");
  expect_refused([&](v1::Sampling& s) { (*s.mutable_logit_bias())[100] = 1; }, "logit_bias");
  expect_refused([&](v1::Sampling& s) { (*s.mutable_logit_bias())[1] = nan; }, "logit_bias");
}

TEST_F(StepValidatorTest, LooksAtNothingOfAnInactiveSequence) {
  table_.Deactivate(table_.Find(1));
  AddDecode(step_, 1, 40);
  ExpectOk(step_);
}

}  // namespace
}  // namespace tandem::gpu
