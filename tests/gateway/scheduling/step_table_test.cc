#include "gateway/scheduling/step_table.h"

#include <gtest/gtest.h>

#include <queue>
#include <set>

namespace tandem::gateway {
namespace {

constexpr SequenceState State(int i) { return static_cast<SequenceState>(i); }
constexpr SequenceEvent Event(int i) { return static_cast<SequenceEvent>(i); }

TEST(StepTable, ReachesEveryStateFromWaiting) {
  std::set<SequenceState> seen = {SequenceState::kWaiting};
  std::queue<SequenceState> todo({SequenceState::kWaiting});
  for (; !todo.empty(); todo.pop()) {
    for (int e = 0; e < kSequenceEvents; ++e) {
      const auto next = Next(todo.front(), Event(e));
      if (next && seen.insert(*next).second) todo.push(*next);
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(kSequenceStates));
}

TEST(StepTable, NothingFollowsGone) {
  for (int e = 0; e < kSequenceEvents; ++e) {
    EXPECT_FALSE(Next(SequenceState::kGone, Event(e))) << Name(Event(e));
  }
}

TEST(StepTable, EveryLiveStateEndsOnceAndSurvivesNoLostWorker) {
  for (int s = 0; s < kSequenceStates - 1; ++s) {
    EXPECT_EQ(Next(State(s), SequenceEvent::kWorkerLost), SequenceState::kGone) << Name(State(s));
    const auto after_end = Next(State(s), SequenceEvent::kEnd);
    EXPECT_EQ(after_end.has_value(), IsOpen(State(s))) << Name(State(s));
    EXPECT_FALSE(after_end && IsOpen(*after_end)) << Name(State(s));
  }
}

TEST(StepTable, AnEndedSequenceNeverComesBack) {
  for (int e = 0; e < kSequenceEvents; ++e) {
    const auto next = Next(SequenceState::kDraining, Event(e));
    EXPECT_EQ(next.value_or(SequenceState::kGone), SequenceState::kGone) << Name(Event(e));
  }
}

TEST(StepTable, OnlyStatesWithBlocksTakeResults) {
  EXPECT_FALSE(TakesResults(SequenceState::kWaiting));
  EXPECT_FALSE(TakesResults(SequenceState::kDraining));
  EXPECT_FALSE(TakesResults(SequenceState::kGone));
  EXPECT_TRUE(TakesResults(SequenceState::kPreempting));
}

}  // namespace
}  // namespace tandem::gateway
