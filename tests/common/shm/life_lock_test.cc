#include "common/shm/life_lock.h"

#include <gtest/gtest.h>
#include <linux/futex.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "common/shm/waiting.h"

namespace tandem::shm {
namespace {

// Two ends in one process; deaths of real processes are in
// tests/gpu_worker/links/link_death_test.cc.
struct Words {
  Line a{};
  Line b{};
};

bool Eventually(const std::atomic<int>& count, int value) {
  for (int i = 0; i < 5000 && count.load() != value; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return count.load() == value;
}

TEST(LifeLock, APeerThatLetsGoIsNoticed) {
  Words words;
  std::atomic<int> gone{0};
  LifeLock mine(
      {.own = &words.a, .peer = &words.b, .peer_gone = {}, .on_peer_gone = [&] { ++gone; }});
  auto theirs = std::make_unique<LifeLock>(
      LifeLock::Options{.own = &words.b, .peer = &words.a, .peer_gone = {}, .on_peer_gone = [] {}});
  ASSERT_TRUE(mine.held() && theirs->held());
  mine.Watch();
  theirs->Watch();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(gone.load(), 0);
  theirs.reset();
  EXPECT_TRUE(Eventually(gone, 1));
}

TEST(LifeLock, TheKernelsMarkOfADeadOwnerIsNoticed) {
  Words words;
  std::atomic<int> gone{0};
  LifeLock mine(
      {.own = &words.a, .peer = &words.b, .peer_gone = {}, .on_peer_gone = [&] { ++gone; }});
  StoreRelease(words.b.value, 12345);
  mine.Watch();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(gone.load(), 0);
  StoreRelease(words.b.value, 12345 | FUTEX_WAITERS | FUTEX_OWNER_DIED);
  FutexWake(&words.b.word, kWakeAll);
  EXPECT_TRUE(Eventually(gone, 1));
}

TEST(LifeLock, TheOtherSignsArePolled) {
  Words words;
  std::atomic<int> gone{0};
  std::atomic<bool> sign{false};
  StoreRelease(words.b.value, 12345);
  LifeLock mine({.own = &words.a,
                 .peer = &words.b,
                 .peer_gone = [&] { return sign.load(); },
                 .on_peer_gone = [&] { ++gone; }});
  mine.Watch();
  sign.store(true);
  EXPECT_TRUE(Eventually(gone, 1));
}

TEST(LifeLock, ATakenWordIsNotHeld) {
  Words words;
  StoreRelease(words.a.value, 99);
  LifeLock mine({.own = &words.a, .peer = &words.b, .peer_gone = {}, .on_peer_gone = [] {}});
  EXPECT_FALSE(mine.held());
  EXPECT_EQ(words.a.word, 99u);
}

TEST(LifeLock, EndsWithoutEverWatching) {
  Words words;
  {
    LifeLock mine({.own = &words.a, .peer = &words.b, .peer_gone = {}, .on_peer_gone = [] {}});
    EXPECT_TRUE(mine.held());
    EXPECT_NE(LoadAcquire(words.a.value), 0u);
  }
  EXPECT_EQ(words.a.word, 0u);
}

}  // namespace
}  // namespace tandem::shm
