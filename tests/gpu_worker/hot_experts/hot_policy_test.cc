// Replays of routing traces: hit rates against the best fixed choice in hindsight, recovery after
// shifts, and rest where nothing is to be gained.

#include "gpu_worker/hot_experts/hot_policy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/gpu_worker/hot_experts/routing_traces.h"
#include "tests/testing/shared_data.h"

namespace tandem::gpu {
namespace {

constexpr uint64_t kSeed = 20261130;

// Slots fill within that: 16 steps of waiting, then four experts in two steps.
int FillSteps(int slots) { return 16 + slots; }

class ReplayTest : public ::testing::TestWithParam<TraceShape> {
 protected:
  ReplayTest() : shape_(GetParam()), slots_(shape_.layers * shape_.experts / 8) {
    RecordProperty("seed", static_cast<int>(kSeed));
  }
  Replay MakeReplay() const { return Replay(shape_, {.slots = slots_}); }

  const TraceShape shape_;
  const int slots_;
};

TEST_P(ReplayTest, SkewedTrafficIsServedLikeByTheBestFixedChoice) {
  for (const double exponent : {0.7, 1.0, 1.5}) {
    const ZipfOrder order(shape_, exponent, 1, kSeed);
    const int begin = FillSteps(slots_);
    const int end = begin + 500;
    const RoutingTrace trace = MakeTrace(
        shape_, end, [&](int, int layer, int e) { return order(0, layer, e); }, kSeed);
    Replay replay = MakeReplay();
    replay.Run(trace, 0, end);
    const double best = BestFixedHitRate(trace, begin, end, replay.planner().capacity());
    EXPECT_GT(replay.HitRate(begin, end), 0.95 * best) << "exponent " << exponent;
    // And it rests: fewer than one expert in twenty of those held moves in 100 steps.
    EXPECT_LT(replay.Migrations(begin, end), slots_ / 4) << "exponent " << exponent;
  }
}

TEST_P(ReplayTest, RecoversFromAShiftWithin200Steps) {
  for (const double exponent : {1.0, 1.5}) {
    const ZipfOrder order(shape_, exponent, 2, kSeed);
    const int shift = FillSteps(slots_) + 200;
    const int end = shift + 300;
    const RoutingTrace trace = MakeTrace(
        shape_, end,
        [&](int step, int layer, int e) { return order(step < shift ? 0 : 1, layer, e); }, kSeed);
    Replay replay = MakeReplay();
    replay.Run(trace, 0, end);
    // Some 50 steps tell a hit rate to a few percent only: hence more than the judged ones.
    const double best = BestFixedHitRate(trace, shift, end, replay.planner().capacity());
    EXPECT_LT(replay.HitRate(shift, shift + 10), 0.6 * best) << "the shift changes nothing";
    EXPECT_GT(replay.HitRate(shift + 200, end), 0.95 * best) << "exponent " << exponent;
  }
}

TEST_P(ReplayTest, UniformTrafficMovesNothingOnceSlotsAreFull) {
  const int begin = FillSteps(slots_);
  const int end = begin + 2000;
  const RoutingTrace trace = MakeTrace(
      shape_, end, [](int, int, int) { return 1.0; }, kSeed);
  Replay replay = MakeReplay();
  replay.Run(trace, 0, end);
  const int capacity = replay.planner().capacity();
  EXPECT_EQ(replay.planner().resident(), capacity);
  EXPECT_EQ(replay.Migrations(begin, end), 0);
  // Any choice is as good as another.
  const double share = static_cast<double>(capacity) / (shape_.layers * shape_.experts);
  EXPECT_NEAR(replay.HitRate(begin, end), share, 0.05 * share);
}

TEST_P(ReplayTest, SlowDriftIsFollowed) {
  // Every 100 steps the popularity of all experts wanders on to their neighbours'.
  const ZipfOrder order(shape_, 1.2, 1, kSeed);
  const int begin = FillSteps(slots_);
  const int end = begin + 1000;
  const RoutingTrace trace = MakeTrace(
      shape_, end,
      [&](int step, int layer, int e) {
        const double at = step / 100.0;
        const int first = static_cast<int>(at);
        const double part = at - first;
        return (1 - part) * order(0, layer, (e + first) % shape_.experts) +
               part * order(0, layer, (e + first + 1) % shape_.experts);
      },
      kSeed);
  Replay replay = MakeReplay();
  replay.Run(trace, 0, end);
  const double fixed = BestFixedHitRate(trace, begin, end, replay.planner().capacity());
  EXPECT_GT(replay.HitRate(begin, end), fixed);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReplayTest,
                         ::testing::Values(TraceShape{6, 32, 4, 4}, TraceShape{24, 64, 8, 1},
                                           TraceShape{12, 128, 8, 8}, TraceShape{1, 64, 8, 32}),
                         [](const auto& info) {
                           return std::to_string(info.param.layers) + "x" +
                                  std::to_string(info.param.experts) + "rows" +
                                  std::to_string(info.param.rows);
                         });

TEST(LayerShift, IsRecoveredFromWithoutMovingTheOtherLayers) {
  const TraceShape shape{12, 64, 8, 4};
  const int slots = 96;
  const ZipfOrder order(shape, 1.2, 2, kSeed);
  const int shift = FillSteps(slots) + 200;
  const int end = shift + 300;
  const RoutingTrace trace = MakeTrace(
      shape, end,
      [&](int step, int layer, int e) {
        return order(step < shift || layer != 2 ? 0 : 1, layer, e);
      },
      kSeed);
  Replay replay(shape, {.slots = slots});
  replay.Run(trace, 0, end);
  const double best = BestFixedHitRate(trace, shift, end, replay.planner().capacity());
  EXPECT_GT(replay.HitRate(shift + 200, end), 0.95 * best);
  EXPECT_LT(replay.Migrations(shift, end), slots / 2);
}

TEST(RecordedReplay, ShippedModelIsServedLikeByTheBestFixedChoice) {
  const RoutingTrace trace =
      ReadTrace((testing::SourceRoot() / "tests/data/routing/tandem_tiny.trace").string());
  for (const int slots : {20, 48, 96}) {
    Replay replay(trace.shape, {.slots = slots});
    replay.Run(trace, 0, trace.steps);
    const int begin = FillSteps(slots);
    const double best = BestFixedHitRate(trace, begin, trace.steps, replay.planner().capacity());
    EXPECT_GT(replay.HitRate(begin, trace.steps), 0.95 * best) << slots << " slots";
  }
}

// --- single decisions ---

class PlannerTest : public ::testing::Test {
 protected:
  // Steps in which every layer picks `expert` once.
  void Pick(uint16_t expert, int steps) {
    for (int i = 0; i < steps; ++i) {
      const uint16_t picks[] = {expert};
      for (int layer = 0; layer < 2; ++layer) counts_.Add(layer, picks);
      counts_.EndStep();
    }
  }
  // Experts 1 and 2 of both layers are busy, three of the four resident.
  void FillSlots(ResidencyPlanner& planner) {
    Pick(1, 20);
    Pick(2, 20);
    while (planner.resident() < 3) {
      for (const Migration& migration : Fill(planner)) planner.Finish(migration);
    }
  }
  std::vector<Migration> Fill(ResidencyPlanner& planner) const {
    std::vector<Migration> migrations;
    planner.Fill(counts_, &migrations);
    return migrations;
  }
  std::vector<Migration> Swap(ResidencyPlanner& planner) const {
    std::vector<Migration> migrations;
    planner.Swap(counts_, &migrations);
    return migrations;
  }

  ExpertCounts counts_{{.layers = 2, .experts = 8}};
  const ResidencyPlanner::Options options_{
      .layers = 2, .experts = 8, .slots = 4, .max_in_flight = 2};
};

TEST_F(PlannerTest, KeepsASlotSpareAndTheRestForResidents) {
  EXPECT_EQ(ResidencyPlanner(options_).capacity(), 3);
  EXPECT_EQ(ResidencyPlanner({.layers = 2, .experts = 8, .slots = 1}).capacity(), 0);
  EXPECT_EQ(ResidencyPlanner({.layers = 2, .experts = 8, .slots = 0}).capacity(), 0);
  EXPECT_EQ(ResidencyPlanner({.layers = 99, .experts = 8, .slots = 640}).capacity(), 632);
}

TEST_F(PlannerTest, FillsWithTheBusiestAtMostSoManyAtOnce) {
  ResidencyPlanner planner(options_);
  EXPECT_TRUE(Fill(planner).empty()) << "nothing was picked yet";
  Pick(5, 1);
  const auto first = Fill(planner);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0].expert, 5);
  EXPECT_EQ(first[0].evicted_expert, -1);
  EXPECT_NE(first[0].slot, first[1].slot);
  EXPECT_TRUE(Fill(planner).empty()) << "two are in flight";
  EXPECT_EQ(planner.slot_of(0, 5), ResidencyPlanner::kNoSlot) << "not copied yet";
  planner.Finish(first[0]);
  EXPECT_EQ(planner.slot_of(first[0].layer, 5), first[0].slot);
}

TEST_F(PlannerTest, VictimServesUntilItsSuccessorIsThere) {
  ResidencyPlanner planner(options_);
  FillSlots(planner);
  EXPECT_TRUE(planner.full());
  Pick(3, 200);
  const auto swaps = Swap(planner);
  ASSERT_EQ(swaps.size(), 1U) << "one slot is spare";
  const Migration& swap = swaps[0];
  EXPECT_EQ(swap.expert, 3);
  const int old = planner.slot_of(swap.evicted_layer, swap.evicted_expert);
  ASSERT_NE(old, ResidencyPlanner::kNoSlot);
  EXPECT_NE(old, swap.slot);
  planner.Finish(swap);
  EXPECT_EQ(planner.slot_of(swap.evicted_layer, swap.evicted_expert), ResidencyPlanner::kNoSlot);
  EXPECT_EQ(planner.slot_of(swap.layer, 3), swap.slot);
  // The slot that came free is the next spare one.
  const auto next = Swap(planner);
  ASSERT_EQ(next.size(), 1U);
  EXPECT_EQ(next[0].slot, old);
}

TEST_F(PlannerTest, SwapsThatGainLittleAreNotMade) {
  ResidencyPlanner planner(options_);
  FillSlots(planner);
  Pick(1, 200);
  Pick(2, 200);
  Pick(3, 2);
  EXPECT_TRUE(Swap(planner).empty());
}

TEST_F(PlannerTest, CancelledMigrationLeavesAllAsItWas) {
  ResidencyPlanner planner(options_);
  FillSlots(planner);
  Pick(3, 200);
  const auto swaps = Swap(planner);
  ASSERT_EQ(swaps.size(), 1U);
  planner.Cancel(swaps[0]);
  EXPECT_EQ(planner.in_flight(), 0);
  EXPECT_EQ(planner.resident(), 3);
  const auto again = Swap(planner);
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ(again[0].slot, swaps[0].slot);
}

TEST_F(PlannerTest, SlotsAreNeverSharedWhateverHappens) {
  std::mt19937_64 random(kSeed);
  ResidencyPlanner planner({.layers = 2, .experts = 8, .slots = 6, .max_in_flight = 3});
  std::vector<Migration> flying;
  for (int round = 0; round < 3000; ++round) {
    // Popularity jumps every 60 rounds.
    Pick(static_cast<uint16_t>((round / 60 * 3 + static_cast<int>(random() % 3)) % 8), 1);
    planner.Fill(counts_, &flying);
    if (planner.full()) planner.Swap(counts_, &flying);
    while (!flying.empty() && random() % 2 == 0) {
      const size_t index = random() % flying.size();
      if (random() % 4 == 0) {
        planner.Cancel(flying[index]);
      } else {
        planner.Finish(flying[index]);
      }
      flying.erase(flying.begin() + static_cast<ptrdiff_t>(index));
    }
    std::multiset<int> slots;
    for (const Migration& migration : flying) slots.insert(migration.slot);
    for (int i = 0; i < 16; ++i) {
      const int slot = planner.slot_of(i / 8, i % 8);
      if (slot != ResidencyPlanner::kNoSlot) slots.insert(slot);
    }
    ASSERT_EQ(std::set<int>(slots.begin(), slots.end()).size(), slots.size()) << "round " << round;
    ASSERT_LE(slots.size(), 6U);
    ASSERT_EQ(static_cast<size_t>(planner.in_flight()), flying.size());
    ASSERT_LE(planner.resident(), planner.capacity());
  }
}

TEST(HotPolicy, WaitsForSomeStepsBeforeTheFirstLoad) {
  HotPolicy policy({.planner = {.layers = 1, .experts = 8, .slots = 4}, .min_steps = 3});
  std::vector<Migration> migrations;
  const uint16_t picks[] = {5};
  for (int step = 0; step < 3; ++step) {
    policy.Plan(&migrations);
    EXPECT_TRUE(migrations.empty()) << step;
    policy.Add(0, picks);
    policy.EndStep();
  }
  policy.Plan(&migrations);
  ASSERT_EQ(migrations.size(), 1U);
  EXPECT_EQ(migrations[0].expert, 5);
}

TEST(ExpertCounts, HalvesAfterAHalfLifeAndSkipsSentinels) {
  ExpertCounts counts({.layers = 1, .experts = 4, .half_life_steps = 10});
  const uint16_t picks[] = {2, 0xFFFF, 2, 4};
  counts.Add(0, picks);
  EXPECT_FLOAT_EQ(counts.count(0, 2), 2);
  for (int i = 0; i < 10; ++i) counts.EndStep();
  EXPECT_NEAR(counts.count(0, 2), 1, 1e-5);
  EXPECT_EQ(counts.count(0, 3), 0);
  // Through many renormalizations.
  for (int i = 0; i < 4000; ++i) {
    counts.Add(0, picks);
    counts.EndStep();
  }
  const double decay = std::exp2(-0.1);
  EXPECT_NEAR(counts.count(0, 2), 2 * decay / (1 - decay), 0.01);
}

}  // namespace
}  // namespace tandem::gpu
