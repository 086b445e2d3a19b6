// Bounds of small graphs, worked out by hand.

#include "tests/bench/pipeline_bound.h"

#include <gtest/gtest.h>

namespace tandem::bench {
namespace {

using gpu::SimLog;
using Kind = gpu::SimOpRecord::Kind;

// Two layers of each lane: pre 10, post 5, wait 1; experts 20 at once and 8 later, the last layer
// 28 at once.
StepCosts TwoLayers(int lanes) {
  const LayerCost first{
      .pre_ns = 10, .post_ns = 5, .wait_ns = 1, .immediate_ns = 20, .deferred_ns = 8};
  const LayerCost last{.pre_ns = 10, .post_ns = 5, .wait_ns = 1, .immediate_ns = 28};
  StepCosts costs;
  costs.head_ns = 100;
  costs.tail_ns = 50;
  costs.latency_ns = 2;
  costs.lanes.assign(static_cast<size_t>(lanes), {first, last});
  return costs;
}

TEST(PipelineBound, OneLaneIsItsLongestPath) {
  // Layer 0: rows leave at 110, answer at 132, seen at 134, done at 135; experts are busy until
  // 140. Layer 1: rows arrive at 147, answer at 175, seen at 177, done at 178; tail.
  EXPECT_EQ(BoundNs(TwoLayers(1)), 228);
}

TEST(PipelineBound, DeferredPartHoldsUpTheNextLayer) {
  StepCosts costs = TwoLayers(1);
  costs.lanes[0][0].deferred_ns = 30;
  // Experts are busy until 162: layer 1's answer at 190.
  EXPECT_EQ(BoundNs(costs), 193 + 50);
}

TEST(PipelineBound, PostMayBeLongerThanTheAnswerTakes) {
  StepCosts costs = TwoLayers(1);
  costs.lanes[0][0].post_ns = 60;
  // Layer 0 done at 171; rows arrive at 183, answer at 211, seen at 213, done at 214.
  EXPECT_EQ(BoundNs(costs), 214 + 50);
}

TEST(PipelineBound, TwoLanesAreBoundByTheirExperts) {
  // 100 + 10 until the first rows leave, 112 of experts, two flags, one answer brought over, tail.
  EXPECT_EQ(ExpertsNs(TwoLayers(2)), 112);
  EXPECT_EQ(BoundNs(TwoLayers(2)), 100 + 10 + 112 + 4 + 1 + 50);
}

TEST(PipelineBound, TwoLanesAreBoundByTheDevice) {
  StepCosts costs = TwoLayers(2);
  for (auto& lane : costs.lanes) {
    for (LayerCost& layer : lane) layer.pre_ns = 100;
  }
  EXPECT_EQ(DeviceNs(costs), 100 + 4 * 106 + 50);
  EXPECT_EQ(BoundNs(costs), DeviceNs(costs));
}

TEST(PipelineBound, OpsBelongToTheLaneWhoseRowsTheyRead) {
  const int32_t rows[3] = {};
  const auto op = [&](int lane, int64_t ns) {
    return gpu::SimOpRecord{.rows = lane < 0 ? nullptr : rows + lane, .duration_ns = ns};
  };
  const auto at = [&](Kind kind, uint32_t lane, int64_t ns) {
    return gpu::SimOpRecord{.kind = kind, .rows = rows + lane, .lane = lane, .duration_ns = ns};
  };
  SimLog::Records records;
  records.ops = {op(-1, 1000),
                 op(2, 500),  // an upload; all rows' embedding
                 op(0, 10),
                 op(-1, 1),
                 at(Kind::kSubmit, 0, 2),
                 op(1, 20),
                 at(Kind::kSubmit, 1, 3),
                 op(0, 30),
                 at(Kind::kWait, 0, 4),
                 op(1, 40),
                 op(-1, 1),
                 at(Kind::kWait, 1, 5),
                 op(2, 600),
                 op(-1, 7)};
  records.ops.insert(records.ops.begin() + 5, {.kind = Kind::kStamp, .duration_ns = 9999});
  records.experts = {{.lane = 0, .immediate_ns = 50, .deferred_ns = 6},
                     {.lane = 1, .immediate_ns = 70}};
  const StepCosts costs = CostsOf(records, 9);
  EXPECT_EQ(costs.head_ns, 1500);
  EXPECT_EQ(costs.tail_ns, 607);
  ASSERT_EQ(costs.lanes.size(), 2u);
  ASSERT_EQ(costs.lanes[0].size(), 1u);
  ASSERT_EQ(costs.lanes[1].size(), 1u);
  const LayerCost& a = costs.lanes[0][0];
  EXPECT_EQ(a.pre_ns, 10 + 1 + 2);
  EXPECT_EQ(a.post_ns, 30);
  EXPECT_EQ(a.wait_ns, 4);
  EXPECT_EQ(a.immediate_ns, 50);
  EXPECT_EQ(a.deferred_ns, 6);
  const LayerCost& b = costs.lanes[1][0];
  EXPECT_EQ(b.pre_ns, 20 + 3);
  EXPECT_EQ(b.post_ns, 40 + 1);
  EXPECT_EQ(b.wait_ns, 5);
  EXPECT_EQ(b.immediate_ns, 70);
}

}  // namespace
}  // namespace tandem::bench
