// The pinned pool: every thread runs every function once, barriers order memory, sleeping pools
// wake.

#include "expert_worker/engine/pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "common/hw/topology.h"

namespace tandem::expert {
namespace {

Pool::Options Spinning(int threads, int spin_us) {
  Pool::Options options;
  options.threads = threads;
  options.spin = std::chrono::microseconds(spin_us);
  return options;
}

class PoolTest : public ::testing::TestWithParam<int> {};  // microseconds of spinning

INSTANTIATE_TEST_SUITE_P(Spin, PoolTest, ::testing::Values(0, 50));

TEST_P(PoolTest, EveryThreadRunsEveryFunctionOnce) {
  for (int threads : {1, 2, 3, 5}) {
    Pool pool(Spinning(threads, GetParam()));
    std::vector<int> calls(static_cast<size_t>(threads), 0);
    for (int run = 0; run < 200; ++run) {
      pool.Run([&](int thread) { ++calls[static_cast<size_t>(thread)]; });
    }
    for (int count : calls) EXPECT_EQ(count, 200);
  }
}

TEST_P(PoolTest, BarrierShowsWhatOthersWroteBeforeIt) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 200;
  Pool pool(Spinning(kThreads, GetParam()));
  std::vector<int> values(kThreads, 0);  // plain memory: a missing barrier is a data race
  std::atomic<int> wrong{0};
  pool.Run([&](int thread) {
    for (int round = 1; round <= kRounds; ++round) {
      values[static_cast<size_t>(thread)] = round;
      pool.Barrier();
      for (int v : values) {
        if (v != round) wrong.fetch_add(1);
      }
      pool.Barrier();
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST_P(PoolTest, ResultsOfARunAreVisibleToTheCaller) {
  Pool pool(Spinning(2, GetParam()));
  int value = 0;
  for (int i = 0; i < 500; ++i) {
    pool.Run([&](int thread) {
      if (thread == 1) value = i;
    });
    ASSERT_EQ(value, i);
  }
}

TEST(Pool, IsDestroyedWhileItsThreadsSleepOrSpin) {
  for (int i = 0; i < 50; ++i) {
    Pool sleeping(Spinning(2, 0));
    Pool spinning(Spinning(2, 1000));
  }
}

TEST(Pool, PinsInsideTheAllowedSetAndCountsRefusals) {
  const std::vector<int> allowed = AllowedCpus();
  Pool::Options options = Spinning(2, 0);
  options.cpus = {allowed.front(), allowed.back()};
  Pool pool(options);
  EXPECT_EQ(pool.pinned_threads(), 1);  // the caller is left alone
  options.cpus = {allowed.front(), 100000};
  Pool refused(options);
  EXPECT_EQ(refused.pinned_threads(), 0);
  int calls = 0;
  refused.Run([&](int thread) {
    if (thread == 1) ++calls;
  });
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace tandem::expert
