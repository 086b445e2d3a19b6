#include "common/shm/team_barrier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace tandem::shm {
namespace {

void RunTeam(int threads, const std::function<void(int)>& fn) {
  std::vector<std::thread> team;
  for (int thread = 0; thread < threads; ++thread) team.emplace_back(fn, thread);
  for (std::thread& member : team) member.join();
}

class TeamBarrierTest : public ::testing::TestWithParam<SpinPolicy> {};

TEST_P(TeamBarrierTest, PublishesPlainWritesRoundAfterRound) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 500;
  TeamBarrier barrier(kThreads);
  std::vector<int> plain(kThreads);
  std::atomic<int> wrong{0};
  RunTeam(kThreads, [&](int thread) {
    for (int round = 1; round <= kRounds; ++round) {
      plain[static_cast<size_t>(thread)] = round;
      barrier.Wait(GetParam());
      for (const int value : plain) wrong += value != round ? 1 : 0;
      barrier.Wait(GetParam());
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, TeamBarrierTest,
                         ::testing::Values(SpinPolicy{.spin_ns = 0, .yield = false},
                                           SpinPolicy{.spin_ns = 20'000, .yield = false},
                                           SpinPolicy{.spin_ns = 20'000, .yield = true}),
                         [](const auto& info) {
                           return info.param.spin_ns == 0 ? "sleep"
                                  : info.param.yield      ? "yield"
                                                          : "spin";
                         });

TEST(TeamBarrier, CallsBackWhileAMemberIsMissing) {
  TeamBarrier barrier(2);
  std::atomic<int> slices{0};
  RunTeam(2, [&](int thread) {
    if (thread == 0) {
      barrier.Wait({}, 1'000'000, [&] { ++slices; });
    } else {
      while (slices.load() < 3) {
        barrier.Nudge();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      barrier.Wait({});
    }
  });
  EXPECT_GE(slices.load(), 3);
}

TEST(TeamBarrier, OneThreadNeverWaits) {
  TeamBarrier barrier(1);
  for (int i = 0; i < 1000; ++i) barrier.Wait({});
}

}  // namespace
}  // namespace tandem::shm
