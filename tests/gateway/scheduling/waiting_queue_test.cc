#include "gateway/scheduling/waiting_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace tandem::gateway {
namespace {

std::vector<RequestId> TakeAll(WaitingQueue* queue) {
  std::vector<RequestId> order;
  while (const auto front = queue->Front()) {
    order.push_back(*front);
    queue->Pop();
  }
  return order;
}

TEST(WaitingQueue, TakesTenantsInTurn) {
  WaitingQueue queue(/*tenants_in_turn=*/true);
  for (RequestId id = 1; id <= 4; ++id) queue.Push("busy", id);
  queue.Push("quiet", 10);
  queue.Push("other", 20);
  queue.Push("quiet", 11);
  EXPECT_EQ(queue.size(), 7u);
  EXPECT_THAT(TakeAll(&queue), testing::ElementsAre(1, 10, 20, 2, 11, 3, 4));
  EXPECT_EQ(queue.size(), 0u);
}

TEST(WaitingQueue, IsFirstComeFirstServedWithoutFairness) {
  WaitingQueue queue(/*tenants_in_turn=*/false);
  queue.Push("a", 1);
  queue.Push("a", 2);
  queue.Push("b", 3);
  EXPECT_THAT(TakeAll(&queue), testing::ElementsAre(1, 2, 3));
}

TEST(WaitingQueue, PreemptedOnesComeFirstByAge) {
  WaitingQueue queue(true);
  queue.Push("a", 1);
  queue.PushPreempted(7, 70);
  queue.PushPreempted(3, 30);
  EXPECT_THAT(TakeAll(&queue), testing::ElementsAre(30, 70, 1));
}

TEST(WaitingQueue, RemovesFromAnyPlace) {
  WaitingQueue queue(true);
  queue.Push("a", 1);
  queue.Push("a", 2);
  queue.Push("b", 3);
  queue.PushPreempted(1, 9);
  EXPECT_TRUE(queue.Remove(9));
  EXPECT_TRUE(queue.Remove(2));
  EXPECT_TRUE(queue.Remove(3));
  EXPECT_FALSE(queue.Remove(3));
  EXPECT_THAT(TakeAll(&queue), testing::ElementsAre(1));
}

}  // namespace
}  // namespace tandem::gateway
