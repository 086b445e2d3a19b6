#include "common/shm/thread_pairs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace tandem::shm {
namespace {

using ::testing::ElementsAre;

TEST(ThreadPairs, ApartIsOnePairOfTheLeaders) {
  EXPECT_THAT(MakePairs(Placement::kApart, {0, 1}, {2, 3, 4}), ElementsAre(ThreadPair{0, 0}));
}

TEST(ThreadPairs, ThreadsOfOneCpuAreAPair) {
  EXPECT_THAT(MakePairs(Placement::kColocated, {0, 1, 2}, {2, 0, 1}),
              ElementsAre(ThreadPair{0, 1}, ThreadPair{1, 2}, ThreadPair{2, 0}));
}

TEST(ThreadPairs, ThreadsWithoutPartnerGoByIndex) {
  EXPECT_THAT(MakePairs(Placement::kColocated, {-1, -1, -1}, {-1, -1}),
              ElementsAre(ThreadPair{0, 0}, ThreadPair{1, 1}, ThreadPair{2, 0}));
  EXPECT_THAT(MakePairs(Placement::kColocated, {5, 6}, {6, 7, 8}),
              ElementsAre(ThreadPair{0, 0}, ThreadPair{1, 0}, ThreadPair{1, 1}, ThreadPair{0, 2}));
}

TEST(ThreadPairs, EveryThreadHasAPairAndPairZeroIsGpuThreadZero) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<int> gpu(1 + random() % 9), expert(1 + random() % 9);
    for (int& cpu : gpu) cpu = static_cast<int>(random() % 6) - 1;
    for (int& cpu : expert) cpu = static_cast<int>(random() % 6) - 1;
    const auto pairs = MakePairs(Placement::kColocated, gpu, expert);
    ASSERT_LE(pairs.size(), kMaxPairs);
    EXPECT_EQ(pairs[0].gpu, 0);
    for (size_t i = 0; i < gpu.size(); ++i) {
      EXPECT_FALSE(PairsOfGpu(pairs, static_cast<int>(i)).empty());
    }
    for (size_t i = 0; i < expert.size(); ++i) {
      EXPECT_FALSE(PairsOfExpert(pairs, static_cast<int>(i)).empty());
    }
  }
}

TEST(ThreadPairs, AutoIsColocatedWhenCpusAreShared) {
  EXPECT_EQ(ResolvePlacement(Placement::kAuto, {0, 1}, {1, 2}, 8), Placement::kColocated);
  EXPECT_EQ(ResolvePlacement(Placement::kAuto, {0, 1}, {2, 3}, 8), Placement::kApart);
  EXPECT_EQ(ResolvePlacement(Placement::kAuto, {-1, -1}, {-1}, 2), Placement::kColocated);
  EXPECT_EQ(ResolvePlacement(Placement::kAuto, {-1, -1}, {-1}, 4), Placement::kApart);
  EXPECT_EQ(ResolvePlacement(Placement::kApart, {0}, {0}, 1), Placement::kApart);
}

}  // namespace
}  // namespace tandem::shm
