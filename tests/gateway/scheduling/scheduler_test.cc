#include "gateway/scheduling/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/gateway/scheduling/scheduler_harness.h"

namespace tandem::gateway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<uint32_t> Tokens(uint32_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

SchedulerOptions Options(uint32_t blocks = 64, uint32_t rows = 32) {
  return {.groups = {{.block_tokens = 4, .block_count = blocks}},
          .max_step_rows = rows,
          .max_sequences = 8};
}

TEST(Scheduler, RunsOneRequestWithAStepInFlightAhead) {
  SchedulerHarness h(Options());
  const RequestId id = h.Add(Tokens(6), 5);
  const auto first = h.Send();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->prompt_tokens, 6u);
  EXPECT_TRUE(first->sequences[0].start);
  EXPECT_TRUE(first->sequences[0].sample);
  EXPECT_EQ(first->sequences[0].appended[0].size(), 2u);
  const auto second = h.Send();
  ASSERT_TRUE(second);
  EXPECT_THAT(second->sequences[0].tokens, IsEmpty());
  EXPECT_EQ(second->sequences[0].start_position, 6u);
  EXPECT_FALSE(h.Send()) << "two steps are out";
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(id).generated, h.Expected(id));
  EXPECT_EQ(h.request(id).end, SequenceEnd::kLength);
}

TEST(Scheduler, DoesNotScheduleBehindMaxTokensInFlight) {
  SchedulerHarness h(Options());
  h.Add(Tokens(6), 1);
  ASSERT_TRUE(h.Send());
  EXPECT_FALSE(h.Send());
  ASSERT_TRUE(h.Receive());
  const auto release = h.Send();
  ASSERT_TRUE(release) << "the worker is told to forget it";
  EXPECT_THAT(release->sequences, IsEmpty());
  EXPECT_EQ(release->released.size(), 1u);
}

TEST(Scheduler, ComputesAPromptWithoutSampling) {
  SchedulerHarness h(Options());
  const RequestId id = h.Add(Tokens(40), 0);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(id).end, SequenceEnd::kLength);
  EXPECT_THAT(h.request(id).generated, IsEmpty());
}

TEST(Scheduler, PicksDecodesBeforePromptChunks) {
  SchedulerHarness h(Options(64, 8));
  h.Add(Tokens(4), 20);
  h.Add(Tokens(4, 100), 20);
  ASSERT_TRUE(h.Send());  // both prompts
  ASSERT_TRUE(h.Receive());
  h.Add(Tokens(30, 200), 5);
  const auto mixed = h.Send();
  ASSERT_TRUE(mixed);
  EXPECT_EQ(mixed->decodes, 2u);
  EXPECT_EQ(mixed->prompt_tokens, 6u);
  EXPECT_THAT(mixed->sequences[0].tokens, IsEmpty());
  EXPECT_THAT(mixed->sequences[1].tokens, IsEmpty());
  EXPECT_EQ(mixed->sequences[2].tokens.size(), 6u);
  EXPECT_FALSE(mixed->sequences[2].sample);
  EXPECT_EQ(mixed->sequences[2].next_prompt_id, 206u);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  for (const auto& [id, request] : h.requests()) EXPECT_EQ(request.generated, h.Expected(id));
}

TEST(Scheduler, ChunkingDoesNotChangeTheTokens) {
  for (const uint32_t chunk : {0u, 1u, 5u, 7u}) {
    SchedulerOptions options = Options(64, 32);
    options.chunks.fixed_tokens = chunk;
    SchedulerHarness h(options);
    const RequestId id = h.Add(Tokens(50), 9);
    ASSERT_TRUE(h.RunAll()) << h.Problem();
    EXPECT_EQ(h.request(id).generated, h.Expected(id)) << "chunks of " << chunk;
  }
}

TEST(Scheduler, AStopTokenEndsOneStepLate) {
  SchedulerHarness h(Options(), 1000);
  const RequestId probe = h.Add(Tokens(6), 8);
  ASSERT_TRUE(h.RunAll());
  const uint32_t third = h.request(probe).generated[2];
  const RequestId id = h.Add(Tokens(6), 8, {.stop_ids = {third}});
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(id).end, SequenceEnd::kStopToken);
  EXPECT_EQ(h.request(id).generated.size(), 3u);
  EXPECT_EQ(h.request(id).ends, 1);
}

TEST(Scheduler, AStopStringDropsTheTokenInFlight) {
  SchedulerHarness h(Options());
  const RequestId id = h.Add(Tokens(6), 50);
  h.Send();
  h.Send();
  ASSERT_TRUE(h.Receive());
  EXPECT_EQ(h.request(id).generated.size(), 1u);
  // The text of the first token ends it; the second token is being computed.
  h.Cancel(id);
  EXPECT_EQ(h.scheduler().StateOf(id), SequenceState::kDraining);
  EXPECT_LT(h.scheduler().blocks().available(0), 64u) << "a step in flight uses them";
  ASSERT_TRUE(h.Receive());
  EXPECT_EQ(h.request(id).generated.size(), 1u);
  EXPECT_EQ(h.scheduler().blocks().available(0), 64u);
  EXPECT_FALSE(h.scheduler().StateOf(id));
  EXPECT_EQ(h.Problem(), "");
}

TEST(Scheduler, CancelWorksInEveryState) {
  SchedulerOptions options = Options(64, 4);
  SchedulerHarness h(options);
  const RequestId decoding = h.Add(Tokens(3), 30);
  h.Send();
  h.Receive();
  const RequestId prefill = h.Add(Tokens(20, 50), 5);
  h.Send();
  const RequestId waiting = h.Add(Tokens(20, 90), 5);
  ASSERT_EQ(h.scheduler().StateOf(decoding), SequenceState::kDecoding);
  ASSERT_EQ(h.scheduler().StateOf(prefill), SequenceState::kPrefill);
  ASSERT_EQ(h.scheduler().StateOf(waiting), SequenceState::kWaiting);
  for (const RequestId id : {decoding, prefill, waiting}) {
    h.Cancel(id);
    EXPECT_FALSE(h.scheduler().End(id)) << "ends once";
  }
  EXPECT_FALSE(h.scheduler().StateOf(waiting));
  h.Receive();
  EXPECT_EQ(h.scheduler().running(), 0u);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.model().sequences(), 0u);
}

TEST(Scheduler, PreemptsTheYoungestAndReproducesItsTokens) {
  SchedulerOptions options = Options(/*blocks=*/12);
  options.prefix_cache = false;
  SchedulerHarness h(options);
  const RequestId a = h.Add(Tokens(8), 30, {.seed = 5});
  const RequestId b = h.Add(Tokens(8, 100), 30, {.seed = 6});
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_GT(h.scheduler().preemptions(), 0u);
  EXPECT_EQ(h.request(a).generated, h.Expected(a));
  EXPECT_EQ(h.request(b).generated, h.Expected(b));
}

TEST(Scheduler, CancelWhilePreemptedFreesEverything) {
  SchedulerOptions options = Options(/*blocks=*/6);
  SchedulerHarness h(options);
  const RequestId a = h.Add(Tokens(8), 16);
  const RequestId b = h.Add(Tokens(6, 100), 16);
  bool preempting = false;
  for (int i = 0; i < 1000 && !preempting; ++i) {
    const bool sent = h.Send().has_value();
    preempting = h.scheduler().StateOf(b) == SequenceState::kPreempting;
    if (!sent && !preempting && !h.Receive()) break;
  }
  ASSERT_TRUE(preempting);
  h.Cancel(b);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(a).generated, h.Expected(a));
  EXPECT_EQ(h.request(b).ends, 1);
}

// Trial KV-1: a prompt that is an exact multiple of the block and wholly cached.
TEST(Scheduler, KV_1_AlwaysComputesTheLastPromptToken) {
  SchedulerHarness h(Options());
  constexpr uint32_t kBlock = 4;
  std::vector<RequestId> ids;
  for (const uint32_t length :
       {2 * kBlock, 2 * kBlock, 2 * kBlock, 2 * kBlock + 1, 2 * kBlock - 1}) {
    ids.push_back(h.Add(Tokens(length), 6));
    ASSERT_TRUE(h.RunAll()) << h.Problem();
    EXPECT_EQ(h.request(ids.back()).generated, h.Expected(ids.back())) << length;
  }
  EXPECT_EQ(h.request(ids[0]).cached_tokens, 0u);
  EXPECT_EQ(h.request(ids[1]).cached_tokens, kBlock);
  EXPECT_EQ(h.request(ids[2]).cached_tokens, kBlock);
  EXPECT_EQ(h.request(ids[3]).cached_tokens, 2 * kBlock);
  EXPECT_EQ(h.request(ids[4]).cached_tokens, kBlock);
}

TEST(Scheduler, ReusesAConversationOfTheSameTenantOnly) {
  SchedulerHarness h(Options());
  const RequestId first = h.Add(Tokens(9), 8, {.tenant = "a"});
  ASSERT_TRUE(h.RunAll());
  std::vector<uint32_t> turn = Tokens(9);
  const auto& answer = h.request(first).generated;
  turn.insert(turn.end(), answer.begin(), answer.end());
  turn.push_back(7);
  const RequestId same = h.Add(turn, 4, {.tenant = "a"});
  const RequestId other = h.Add(turn, 4, {.tenant = "b"});
  const RequestId whole = h.Add(turn, 4, {.tenant = "a", .use_prefix_cache = false});
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(same).cached_tokens, 16u);
  EXPECT_EQ(h.request(other).cached_tokens, 0u);
  EXPECT_EQ(h.request(whole).cached_tokens, 0u);
  for (const RequestId id : {same, other, whole}) {
    EXPECT_EQ(h.request(id).generated, h.Expected(id));
  }
}

TEST(Scheduler, BlocksAreKnownOnlyAfterTheirStep) {
  SchedulerHarness h(Options());
  h.Add(Tokens(12), 1);
  ASSERT_TRUE(h.Send());
  EXPECT_EQ(h.scheduler().blocks().cached_entries(), 0u);
  h.FailStep();
  EXPECT_EQ(h.scheduler().blocks().cached_entries(), 0u);
  h.Add(Tokens(12), 1);
  ASSERT_TRUE(h.RunAll());
  EXPECT_EQ(h.scheduler().blocks().cached_entries(), 3u);
}

TEST(Scheduler, AFailedStepEndsAllOpenRequestsAndServiceGoesOn) {
  SchedulerHarness h(Options(64, 8));
  for (uint32_t i = 0; i < 4; ++i) h.Add(Tokens(6, 100 * i), 10);
  h.Send();
  h.Send();
  h.FailStep();
  for (const auto& [id, request] : h.requests()) {
    EXPECT_TRUE(request.failed) << id;
    EXPECT_EQ(request.ends, 1);
  }
  EXPECT_EQ(h.scheduler().waiting(), 0u);
  ASSERT_TRUE(h.Receive());  // the other step out: all of it is dropped
  EXPECT_EQ(h.scheduler().running(), 0u);
  const RequestId id = h.Add(Tokens(6), 10);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(id).generated, h.Expected(id));
}

TEST(Scheduler, ALostWorkerKeepsPrefixesOnlyWithinItsEpoch) {
  SchedulerHarness h(Options());
  h.Add(Tokens(12), 2);
  ASSERT_TRUE(h.RunAll());
  const RequestId lost = h.Add(Tokens(9, 500), 20);
  h.Send();
  h.LoseWorker(/*new_epoch=*/false);
  EXPECT_TRUE(h.request(lost).failed);
  const RequestId same = h.Add(Tokens(12), 5);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(same).cached_tokens, 8u);
  EXPECT_EQ(h.request(same).generated, h.Expected(same));
  h.LoseWorker(/*new_epoch=*/true);
  const RequestId fresh = h.Add(Tokens(12), 5);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  EXPECT_EQ(h.request(fresh).cached_tokens, 0u);
  EXPECT_EQ(h.request(fresh).generated, h.Expected(fresh));
}

TEST(Scheduler, KeepsWithinTheWorkersSequences) {
  SchedulerOptions options = Options(256, 64);
  options.max_sequences = 3;
  SchedulerHarness h(options);
  for (uint32_t i = 0; i < 10; ++i) h.Add(Tokens(5, 50 * i), 7);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  for (const auto& [id, request] : h.requests()) EXPECT_EQ(request.generated, h.Expected(id));
}

TEST(Scheduler, ABusyTenantDoesNotDelayAnother) {
  SchedulerOptions options = Options(256, 16);
  options.max_sequences = 1;
  SchedulerHarness h(options);
  for (uint32_t i = 0; i < 5; ++i) h.Add(Tokens(5, 50 * i), 3, {.tenant = "busy"});
  const RequestId quiet = h.Add(Tokens(5, 900), 3, {.tenant = "quiet"});
  std::vector<RequestId> order;
  while (auto plan = h.Send()) {
    for (const auto& sequence : plan->sequences) {
      if (sequence.start) order.push_back(sequence.request);
    }
    while (h.Receive()) {
    }
  }
  ASSERT_EQ(h.Problem(), "");
  ASSERT_EQ(order.size(), 6u);
  EXPECT_EQ(order[1], quiet);
}

TEST(Scheduler, SeveralCacheGroupsStayInStep) {
  SchedulerOptions options = Options();
  options.groups = {{.block_tokens = 4, .block_count = 20},
                    {.block_tokens = 8, .block_count = 9, .keeps_all_tokens = false}};
  SchedulerHarness h(options);
  for (uint32_t i = 0; i < 5; ++i) h.Add(Tokens(11, 50 * i), 20);
  ASSERT_TRUE(h.RunAll()) << h.Problem();
  for (const auto& [id, request] : h.requests()) EXPECT_EQ(request.generated, h.Expected(id));
}

TEST(Scheduler, RefusesAnAnswerThatDoesNotFit) {
  Scheduler scheduler(Options());
  scheduler.Add({.id = 1, .tenant = "", .prompt = Tokens(4), .max_tokens = 4});
  const auto plan = scheduler.Plan();
  ASSERT_TRUE(plan);
  const uint64_t worker = plan->sequences[0].worker_sequence;
  const auto refuses = [&](uint64_t step, std::vector<SequenceOutcome> outcomes) {
    return scheduler.Complete(step, outcomes).status().code() == absl::StatusCode::kInternal;
  };
  EXPECT_TRUE(refuses(plan->step_id + 1, {{worker, {1}, WorkerEnd::kNone}}));
  EXPECT_TRUE(refuses(plan->step_id, {}));
  EXPECT_TRUE(refuses(plan->step_id, {{worker + 1, {1}, WorkerEnd::kNone}}));
  EXPECT_TRUE(refuses(plan->step_id, {{worker, {}, WorkerEnd::kNone}}));
  EXPECT_TRUE(refuses(plan->step_id, {{worker, {1, 2}, WorkerEnd::kNone}}));
  EXPECT_TRUE(refuses(plan->step_id, {{worker, {}, WorkerEnd::kInactive}}));
  EXPECT_EQ(scheduler.Audit(), "");
  const std::vector<SequenceOutcome> right = {{worker, {1}, WorkerEnd::kNone}};
  EXPECT_TRUE(scheduler.Complete(plan->step_id, right).ok());
}

TEST(Scheduler, ANumericErrorEndsOnlyItsSequenceAndItsBlocksAreForgotten) {
  Scheduler scheduler(Options());
  scheduler.Add({.id = 1, .tenant = "", .prompt = Tokens(8), .max_tokens = 4});
  scheduler.Add({.id = 2, .tenant = "", .prompt = Tokens(8, 100), .max_tokens = 4});
  const auto plan = scheduler.Plan();
  ASSERT_TRUE(plan);
  const std::vector<SequenceOutcome> outcomes = {
      {plan->sequences[0].worker_sequence, {}, WorkerEnd::kNumericError},
      {plan->sequences[1].worker_sequence, {5}, WorkerEnd::kNone}};
  const auto progress = scheduler.Complete(plan->step_id, outcomes);
  ASSERT_TRUE(progress.ok());
  ASSERT_EQ(progress->size(), 2u);
  EXPECT_EQ((*progress)[0].end, SequenceEnd::kNumericError);
  EXPECT_EQ((*progress)[1].end, SequenceEnd::kNone);
  EXPECT_THAT((*progress)[1].tokens, ElementsAre(5));
  EXPECT_EQ(scheduler.blocks().cached_entries(), 2u);
  EXPECT_EQ(scheduler.Audit(), "");
}

}  // namespace
}  // namespace tandem::gateway
