// What ops and experts cost, against figures worked out by hand from the models' published shapes.

#include "gpu_worker/backend_sim/op_cost.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "gpu_worker/backend_sim/sim_machine.h"

namespace tandem::gpu {
namespace {

SimShape ShapeOf(std::string_view name) {
  const SimModel* model = FindSimModel(name);
  EXPECT_NE(model, nullptr);
  auto shape = MakeSimShape(*model);
  EXPECT_TRUE(shape.ok()) << shape.status();
  return *std::move(shape);
}

LinearWeight WeightOf(int64_t n, int64_t k) {
  LinearWeight weight;
  weight.n = n;
  weight.k = k;
  return weight;
}

OpCost LinearCost(const SimShape& shape, const LinearWeight& weight, int32_t rows) {
  LinearArgs args;
  args.rows = {8, &rows};
  args.weight = &weight;
  return CostOf(shape, args);
}

TEST(OpCost, EveryModelHasADistinctWidthForEachOfTheBigOnes) {
  for (const SimModel& model : SimModels()) {
    const auto shape = MakeSimShape(model);
    EXPECT_TRUE(shape.ok()) << model.name << ": " << shape.status();
  }
}

TEST(OpCost, LinearReadsItsWeightsOnceAndItsRows) {
  const SimShape shape = ShapeOf("qwen3-30b-int4");
  const LinearWeight q = WeightOf(4 * 24, 64);  // stands for [4096, 2048]
  const OpCost cost = LinearCost(shape, q, 3);
  EXPECT_EQ(cost.bytes, 4096.0 * 2048 * 2 + 3 * 4.0 * (4096 + 2048));
  EXPECT_EQ(cost.flops, 2.0 * 3 * 4096 * 2048);
  const SimMachine& machine = *FindSimMachine("rtx4090-2s");
  // 16,850,944 bytes at 1,008 GB/s; 50 MFLOP at 165 TFLOP/s would take 305 ns.
  EXPECT_EQ(RoofNs(cost.bytes, machine.gpu_bandwidth_gbps, cost.flops, machine.gpu_tflops), 16717);
}

TEST(OpCost, HeadIsBf16WhereTheRestIsFp8) {
  const SimShape shape = ShapeOf("deepseek-v3-int4");
  const LinearWeight head = WeightOf(320, 64);
  const LinearWeight o = WeightOf(64, 4 * 20);
  EXPECT_EQ(LinearCost(shape, head, 1).bytes, 129280.0 * 7168 * 2 + 4.0 * (129280 + 7168));
  EXPECT_EQ(LinearCost(shape, o, 1).bytes, 7168.0 * 128 * 128 * 1 + 4.0 * (7168 + 128 * 128));
}

TEST(OpCost, ComputeBoundRowsTakeTheOperationsTime) {
  // 2,048 rows of [4096, 2048]: 34.36 GFLOP at 165.2 TFLOP/s, though the bytes take 117 us.
  EXPECT_EQ(RoofNs(117e3 * 1008, 1008, 2.0 * 2048 * 4096 * 2048, 165.2), 207989);
}

TEST(OpCost, AttentionReadsEachSequencesKeysUpToItsPosition) {
  SimShape shape = ShapeOf("qwen3-30b-int4");
  shape.context_offset = 4096;
  const std::vector<int32_t> positions = {9, 99};
  const std::vector<int32_t> sequence = {0, 1};
  const int32_t rows = 2;
  AttentionArgs args;
  args.rows = {4, &rows};
  args.place.positions = positions.data();
  args.place.sequence = sequence.data();
  const double keys = (4096 + 10) + (4096 + 100);
  const OpCost cost = CostOf(shape, args);
  EXPECT_EQ(cost.bytes, keys * 2 * 4 * 128 * 2);           // K and V of 4 heads, BF16
  EXPECT_EQ(cost.flops, keys * 32 * (2 * 128 + 2 * 128));  // scores and sums of 32 heads
}

TEST(OpCost, PrefillReadsKeysOnceATileOf128Queries) {
  const SimShape shape = ShapeOf("qwen3-30b-int4");
  const int32_t rows = 300;
  std::vector<int32_t> positions(300);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int32_t> sequence(300, 0);
  AttentionArgs args;
  args.rows = {512, &rows};
  args.place.positions = positions.data();
  args.place.sequence = sequence.data();
  const OpCost cost = CostOf(shape, args);
  EXPECT_EQ(cost.bytes, (128 + 256 + 300) * 2.0 * 4 * 128 * 2);
  EXPECT_EQ(cost.flops, 300 * 301 / 2 * 32.0 * 4 * 128);
  args.window_tokens = 16;
  EXPECT_EQ(CostOf(shape, args).bytes, 3 * 16 * 2.0 * 4 * 128 * 2);
}

TEST(OpCost, LatentAttentionReadsOneLatentAToken) {
  const SimShape shape = ShapeOf("deepseek-v3-bf16");
  const int32_t rows = 1;
  const int32_t position = 999;
  const int32_t sequence = 0;
  LatentAttentionArgs args;
  args.rows = {1, &rows};
  args.place.positions = &position;
  args.place.sequence = &sequence;
  const OpCost cost = CostOf(shape, args);
  EXPECT_EQ(cost.bytes, 1000 * 576.0 * 2);
  EXPECT_EQ(cost.flops, 1000 * 128 * 2.0 * (512 + 64 + 512));
}

TEST(OpCost, HeadLinearCountsEveryHead) {
  const SimShape shape = ShapeOf("deepseek-v3-bf16");
  std::vector<std::unique_ptr<LinearWeight>> heads(4);
  for (auto& head : heads) head = std::make_unique<LinearWeight>(WeightOf(32, 16));
  const int32_t rows = 1;
  HeadLinearArgs args;
  args.rows = {1, &rows};
  args.weights = heads.data();
  args.heads = 4;
  const OpCost cost = CostOf(shape, args);
  EXPECT_EQ(cost.bytes, 128 * (512.0 * 128 * 2 + 4 * (512 + 128)));
  EXPECT_EQ(cost.flops, 128 * 2.0 * 512 * 128);
}

TEST(OpCost, NormOfHeadsCountsTheBigModelsHeads) {
  const SimShape shape = ShapeOf("qwen3-30b-int4");
  const int32_t rows = 2;
  RmsNormArgs args;
  args.rows = {2, &rows};
  args.width = 24;
  args.groups = 2;  // kv heads: 4 of 128
  EXPECT_EQ(CostOf(shape, args).bytes, 2 * 4 * 128 * 4.0 * 2);
}

TEST(OpCost, ExpertsAreOfTheBigModelsSizeAndFormat) {
  EXPECT_EQ(ShapeOf("qwen3-30b-int4").expert_bytes(), 2654208);     // 4,718,592 at 4.5 bits
  EXPECT_EQ(ShapeOf("deepseek-v3-bf16").expert_bytes(), 88080384);  // 44,040,192 in BF16
  EXPECT_EQ(ShapeOf("deepseek-v3-bf16").expert_flops(), 88080384);
}

TEST(SimShape, RefusesASmallModelOfAnotherGraph) {
  const SimShape shape = ShapeOf("qwen3-30b-int4");
  ModelSpec other = shape.small;
  other.moe.top_k = 4;
  EXPECT_FALSE(MakeSimShape(other, shape.big, shape.bytes).ok());
  other = shape.small;
  other.layers.pop_back();
  EXPECT_FALSE(MakeSimShape(other, shape.big, shape.bytes).ok());
  other = shape.small;
  other.vocab = other.hidden;  // 64 would stand for 2,048 and for 151,936
  EXPECT_FALSE(MakeSimShape(other, shape.big, shape.bytes).ok());
}

TEST(OpCost, ResidentExpertsAreReadOnceEach) {
  const SimShape shape = ShapeOf("qwen3-30b-int4");
  ASSERT_EQ(shape.big.moe.top_k, 8);
  std::vector<uint16_t> slots(16, kNoExpert);
  slots[0] = 3;
  slots[5] = 4;
  slots[9] = 3;
  const int32_t rows = 2;
  ResidentExpertsArgs args;
  args.rows = {8, &rows};
  args.slots = slots.data();
  const OpCost cost = CostOf(shape, args);
  EXPECT_EQ(cost.flops, 3 * 6.0 * 2048 * 768);
  EXPECT_EQ(cost.bytes, 2 * shape.expert_bytes() + 2 * 3 * 4.0 * 2048);
  std::fill(slots.begin(), slots.end(), kNoExpert);
  EXPECT_EQ(CostOf(shape, args).flops, 0);
}

TEST(SimMachine, SlowerGpuStretchesEveryOpAndLeavesTheRest) {
  const SimMachine& machine = *FindSimMachine("a100-2s");
  const SimMachine slower = SlowerGpu(machine, 3);
  EXPECT_NEAR(static_cast<double>(RoofNs(1e9, slower.gpu_bandwidth_gbps, 0, 1)),
              3.0 * static_cast<double>(RoofNs(1e9, machine.gpu_bandwidth_gbps, 0, 1)), 3);
  EXPECT_EQ(slower.graph_gap_us, 3 * machine.graph_gap_us);
  EXPECT_EQ(slower.cpu_bandwidth_gbps, machine.cpu_bandwidth_gbps);
  EXPECT_EQ(slower.to_host_gbps, machine.to_host_gbps);
}

}  // namespace
}  // namespace tandem::gpu
