#include "gateway/step_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace tandem::gateway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(EncodeStep, CarriesAStartWithItsRules) {
  GenerationRequest request;
  request.prompt = {5, 6, 7};
  request.sampling.temperature = 0.5f;
  request.sampling.seed = ~uint64_t{0};
  request.sampling.logit_bias[9] = -2;
  request.stopping = {.max_tokens = 10, .min_tokens = 2, .stop_strings = {}, .stop_token_ids = {4}};
  request.top_logprobs = 0;
  const std::vector<uint32_t> end_ids = {8, 4};

  PlannedSequence planned;
  planned.request = 1;
  planned.worker_sequence = 77;
  planned.start = true;
  planned.tokens = {5, 6};
  planned.next_prompt_id = 7;
  planned.appended = {{}, {30, 31}};
  StepPlan plan{.step_id = 3, .released = {70}, .sequences = {planned}};
  const auto rules = [&](RequestId) {
    return SequenceRules{.request = &request, .end_ids = end_ids, .wants_prompt_logprobs = false};
  };
  const worker::v1::Step step = EncodeStep(plan, 12, rules).step();
  EXPECT_EQ(step.step_id(), 3u);
  EXPECT_EQ(step.epoch(), 12u);
  EXPECT_THAT(step.release_sequence_ids(), ElementsAre(70));
  ASSERT_EQ(step.starts_size(), 1);
  const auto& start = step.starts(0);
  EXPECT_EQ(start.sequence_id(), 77u);
  EXPECT_THAT(start.stopping().stop_token_ids(), ElementsAre(4, 8));
  EXPECT_EQ(start.stopping().max_tokens(), 10u);
  EXPECT_EQ(start.stopping().min_tokens(), 2u);
  EXPECT_EQ(start.sampling().seed(), ~uint64_t{0});
  EXPECT_EQ(start.sampling().logit_bias().at(9), -2);
  EXPECT_EQ(start.sampling().top_logprobs(), 0);
  EXPECT_EQ(start.prompt_logprobs(), -1);
  EXPECT_THAT(start.penalty_prompt_ids(), IsEmpty());
  const auto& sequence = step.sequences(0);
  EXPECT_THAT(sequence.tokens().ids(), ElementsAre(5, 6));
  EXPECT_EQ(sequence.next_prompt_id(), 7u);
  ASSERT_EQ(sequence.block_appends_size(), 1);
  EXPECT_EQ(sequence.block_appends(0).cache_group(), 1u);
  EXPECT_THAT(sequence.block_appends(0).block_ids(), ElementsAre(30, 31));
}

TEST(EncodeStep, APreemptedSequenceKeepsItsCountsAndPenalties) {
  GenerationRequest request;
  request.prompt = {5, 6, 7};
  request.sampling.repetition_penalty = 1.2f;
  request.stopping.max_tokens = 10;
  request.stopping.min_tokens = 1;
  request.stopping.ignore_eos = true;
  const std::vector<uint32_t> end_ids = {8};
  PlannedSequence planned;
  planned.start = true;
  planned.generated = {20, 21};
  planned.tokens = {5, 6, 7, 20, 21};
  StepPlan plan;
  plan.sequences = {planned};
  const auto start =
      EncodeStep(plan, 1,
                 [&](RequestId) { return SequenceRules{.request = &request, .end_ids = end_ids}; })
          .step()
          .starts(0);
  EXPECT_EQ(start.stopping().max_tokens(), 8u);
  EXPECT_EQ(start.stopping().min_tokens(), 0u);
  EXPECT_THAT(start.stopping().stop_token_ids(), IsEmpty());
  EXPECT_THAT(start.penalty_prompt_ids(), ElementsAre(5, 6, 7));
  EXPECT_THAT(start.penalty_output_ids(), ElementsAre(20, 21));
}

TEST(DecodeCapacity, RefusesWhatCannotBe) {
  worker::v1::ModelInfo info;
  EXPECT_EQ(DecodeCapacity(info).status().code(), absl::StatusCode::kInternal);
  info.set_vocab_size(10);
  info.set_max_context_tokens(100);
  info.set_max_step_rows(8);
  info.set_max_sequences(2);
  auto* group = info.add_cache_groups();
  group->set_kind(worker::v1::CACHE_KIND_FULL);
  group->set_block_tokens(16);
  EXPECT_EQ(DecodeCapacity(info).status().code(), absl::StatusCode::kInternal);
  group->set_block_count(4);
  EXPECT_TRUE(DecodeCapacity(info).ok());
  group->set_kind(worker::v1::CACHE_KIND_RECURRENT_STATE);
  EXPECT_EQ(DecodeCapacity(info).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(CheckRequest, NamesTheFieldAtFault) {
  ServedModel model;
  model.vocab_size = 100;
  model.max_logprobs = 20;
  GenerationRequest good;
  good.prompt = {1};
  good.stopping.max_tokens = 5;
  EXPECT_TRUE(CheckRequest(good, model).ok());
  const auto fails = [&](const char* field, auto change) {
    GenerationRequest request = good;
    change(request);
    const absl::Status status = CheckRequest(request, model);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_NE(status.message().find(field), absl::string_view::npos) << status;
  };
  fails("prompt", [](auto& r) { r.prompt = {100}; });
  fails("temperature", [](auto& r) { r.sampling.temperature = -1; });
  fails("temperature", [](auto& r) { r.sampling.temperature = std::nanf(""); });
  fails("top_p", [](auto& r) { r.sampling.top_p = 0; });
  fails("min_p", [](auto& r) { r.sampling.min_p = 2; });
  fails("repetition_penalty", [](auto& r) { r.sampling.repetition_penalty = 0; });
  fails("presence_penalty", [](auto& r) { r.sampling.presence_penalty = INFINITY; });
  fails("frequency_penalty", [](auto& r) { r.sampling.frequency_penalty = INFINITY; });
  fails("logit_bias", [](auto& r) { r.sampling.logit_bias[100] = 1; });
  fails("logit_bias", [](auto& r) { r.sampling.logit_bias[1] = INFINITY; });
  fails("stop_token_ids", [](auto& r) { r.stopping.stop_token_ids = {100}; });
  fails("stop_token_ids", [](auto& r) { r.stopping.stop_token_ids.assign(300, 1); });
  fails("min_tokens", [](auto& r) { r.stopping.min_tokens = 6; });
  fails("logprobs", [](auto& r) { r.top_logprobs = 21; });
}

}  // namespace
}  // namespace tandem::gateway
