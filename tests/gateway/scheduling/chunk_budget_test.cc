#include "gateway/scheduling/chunk_budget.h"

#include <gtest/gtest.h>

namespace tandem::gateway {
namespace {

TEST(ChunkBudget, GivesTheWholeStepWhenNothingDecodes) {
  const ChunkBudget budget({.max_tokens = 512, .target_ns = 1'000'000});
  EXPECT_EQ(budget.Tokens(0), 512u);
}

TEST(ChunkBudget, FixedBudgetHoldsForEveryStep) {
  ChunkBudget budget({.fixed_tokens = 5, .max_tokens = 512, .target_ns = 1'000'000});
  budget.Observe(3, 100, 1'000);
  EXPECT_EQ(budget.Tokens(0), 5u);
  EXPECT_EQ(budget.Tokens(9), 5u);
}

TEST(ChunkBudget, KeepsAStepWithDecodesUnderTheTarget) {
  ChunkBudget budget({.max_tokens = 4096, .target_ns = 100'000'000});
  budget.Observe(4, 0, 20'000'000);
  budget.Observe(4, 100, 40'000'000);  // 0.2 ms a prompt token
  EXPECT_NEAR(budget.Tokens(4), 400, 1);
  for (int i = 0; i < 100; ++i) budget.Observe(4, 100, 120'000'000);  // now 1 ms
  EXPECT_NEAR(budget.Tokens(4), 80, 1);
}

TEST(ChunkBudget, LetsPromptsDoubleASlowDecodeStep) {
  ChunkBudget budget({.max_tokens = 4096, .target_ns = 100'000'000});
  budget.Observe(4, 0, 200'000'000);
  budget.Observe(4, 100, 300'000'000);  // 1 ms a prompt token
  EXPECT_NEAR(budget.Tokens(4), 200, 1);
}

TEST(ChunkBudget, FollowsTheWorkersAdvice) {
  ChunkBudget budget({.max_tokens = 512, .target_ns = 50'000'000, .min_tokens = 16});
  EXPECT_EQ(budget.limit_ns(), 50'000'000);
  budget.Observe(4, 0, 40'000'000);
  budget.Observe(4, 100, 60'000'000);
  EXPECT_EQ(budget.limit_ns(), 80'000'000);  // a slow decode step may double
  budget.Advise(4, 96);
  EXPECT_EQ(budget.Tokens(4), 96u);
  EXPECT_EQ(budget.Tokens(10), 90u);  // rows are rows
  EXPECT_EQ(budget.Tokens(99), 16u);
  EXPECT_EQ(budget.Tokens(0), 512u);
  budget.Advise(4, 0);
  EXPECT_NEAR(budget.Tokens(4), 200, 1);
  const ChunkBudget fixed({.fixed_tokens = 5, .max_tokens = 512, .target_ns = 1});
  EXPECT_EQ(fixed.limit_ns(), 0);
}

TEST(ChunkBudget, NeverFallsUnderTheSmallestChunk) {
  ChunkBudget budget({.max_tokens = 4096, .target_ns = 1'000, .min_tokens = 16});
  budget.Observe(1, 0, 1'000'000);
  budget.Observe(1, 1, 500'000'000);
  EXPECT_EQ(budget.Tokens(1), 16u);
}

}  // namespace
}  // namespace tandem::gateway
