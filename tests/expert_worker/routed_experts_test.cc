// The routed-expert block in parity mode against a double-precision sum, and its independence of
// rows, threads, instruction set and cut.

#include "expert_worker/engine/routed_experts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "expert_worker/kernels/tables.h"
#include "tests/expert_worker/expert_fakes.h"
#include "tests/expert_worker/test_block.h"

namespace tandem::expert {
namespace {

using kernels::KernelTable;
using kernels::kRefTable;

Block WholeBlock(const FakeExperts& experts, const KernelTable& table, int threads) {
  return Block(experts, table, {.threads = threads});
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(RoutedExperts, EqualsTheDoublePrecisionSum) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (uint32_t intermediate : {16u, 30u, 77u, 130u}) {
      FakeShape shape;
      shape.hidden = 72;
      shape.intermediate = intermediate;
      shape.dtype = dtype;
      const FakeExperts experts(shape, 1);
      for (const KernelTable* table : RunnableTables()) {
        Block block = WholeBlock(experts, *table, 2);
        for (uint32_t rows : {1u, 2u, 7u, 150u}) {
          const Batch batch = RandomBatch(shape, rows, 3, rows);
          const auto want = ExpectedBlock(experts, 1, batch.x, batch.ids, batch.weights, 3);
          EXPECT_LT(LargestError(block.Run(batch), want), 2e-6)
              << table->name << " rows " << rows << " intermediate " << intermediate;
        }
      }
    }
  }
}

TEST(RoutedExperts, HasTheSameBitsOnEveryTableAndThreadCount) {
  FakeShape shape;
  shape.hidden = 104;
  shape.intermediate = 50;
  shape.dtype = DType::kBF16;
  const FakeExperts experts(shape, 2);
  const Batch batch = RandomBatch(shape, 33, 2, 3);
  const std::vector<float> want = WholeBlock(experts, kRefTable, 1).Run(batch);
  for (const KernelTable* table : RunnableTables()) {
    for (int threads : {1, 2, 3, 5}) {
      Block block = WholeBlock(experts, *table, threads);
      EXPECT_TRUE(SameBits(want, block.Run(batch))) << table->name << " threads " << threads;
      EXPECT_GT(block.ticks.load(), 0u);
    }
  }
}

TEST(RoutedExperts, ARowsResultDoesNotDependOnOtherRows) {
  FakeShape shape;
  const FakeExperts experts(shape, 4);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  const Batch batch = RandomBatch(shape, 200, 3, 5);
  const std::vector<float> together = block.Run(batch);
  for (uint32_t r = 0; r < batch.rows; r += 13) {
    const Batch alone = OneRow(batch, r);
    const std::vector<float> out = block.Run(alone);
    EXPECT_EQ(
        std::memcmp(out.data(), together.data() + r * shape.hidden, shape.hidden * sizeof(float)),
        0)
        << "row " << r;
  }
}

TEST(RoutedExperts, AllRowsOnOneExpert) {
  FakeShape shape;
  const FakeExperts experts(shape, 6);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  Batch batch = RandomBatch(shape, 300, 1, 7);
  std::fill(batch.ids.begin(), batch.ids.end(), uint16_t{2});
  EXPECT_LT(LargestError(block.Run(batch),
                         ExpectedBlock(experts, 1, batch.x, batch.ids, batch.weights, 1)),
            2e-6);
}

TEST(RoutedExperts, SkippedPicksCountForNothing) {
  FakeShape shape;
  const FakeExperts experts(shape, 8);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  Batch batch = RandomBatch(shape, 9, 3, 9);
  for (uint32_t i = 0; i < batch.ids.size(); i += 2) {
    batch.ids[i] = shm::kNoExpert;
    batch.weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  EXPECT_LT(LargestError(block.Run(batch),
                         ExpectedBlock(experts, 1, batch.x, batch.ids, batch.weights, 3)),
            2e-6);
  std::fill(batch.ids.begin(), batch.ids.end(), shm::kNoExpert);
  EXPECT_EQ(block.Run(batch), std::vector<float>(batch.x.size(), 0.0f));
}

TEST(RoutedExperts, NoRowsAndLayersWithoutExperts) {
  FakeShape shape;
  const FakeExperts experts(shape, 10);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  EXPECT_TRUE(block.Run(Batch{0, 2, {}, {}, {}}).empty());
  const Batch batch = RandomBatch(shape, 5, 2, 11);
  EXPECT_EQ(block.Run(batch, 0), std::vector<float>(batch.x.size(), 0.0f));
}

TEST(RoutedExperts, NanStaysInItsRow) {
  FakeShape shape;
  const FakeExperts experts(shape, 12);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  Batch batch = RandomBatch(shape, 6, 2, 13);
  batch.x[2 * shape.hidden + 5] = std::numeric_limits<float>::quiet_NaN();
  batch.weights[4 * 2] = std::numeric_limits<float>::infinity();
  const std::vector<float> out = block.Run(batch);
  for (uint32_t r = 0; r < 6; ++r) {
    for (uint32_t c = 0; c < shape.hidden; ++c) {
      const float v = out[r * shape.hidden + c];
      EXPECT_EQ(std::isfinite(v), r != 2 && r != 4) << r << " " << c;
    }
  }
}

TEST(RoutedExperts, BiasesAndClampedActivation) {
  FakeShape shape;
  shape.biases = true;
  shape.activation = {.limit = 1.5f, .alpha = 1.702f, .up_offset = 1.0f};
  const FakeExperts experts(shape, 14);
  const Batch batch = RandomBatch(shape, 17, 3, 15);
  const auto want = ExpectedBlock(experts, 1, batch.x, batch.ids, batch.weights, 3);
  const std::vector<float> reference = WholeBlock(experts, kRefTable, 1).Run(batch);
  EXPECT_LT(LargestError(reference, want), 2e-6);
  for (const KernelTable* table : RunnableTables()) {
    EXPECT_TRUE(SameBits(WholeBlock(experts, *table, 2).Run(batch), reference)) << table->name;
  }
}

TEST(RoutedExperts, WorkersWithUnevenSharesSumToTheWhole) {
  FakeShape shape;
  shape.intermediate = 77;
  shape.biases = true;
  const FakeExperts experts(shape, 16);
  const KernelTable& table = *RunnableTables().front();
  const uint32_t quantum = experts.quantum();
  const uint32_t segments = experts.all().size();
  const Batch batch = RandomBatch(shape, 12, 3, 17);
  const auto exact = ExpectedBlock(experts, 1, batch.x, batch.ids, batch.weights, 3);
  const std::vector<std::vector<uint32_t>> cases = {{1, 1}, {3, 1}, {1, 1, 1}, {0, 1}, {1, 0, 5}};
  for (const auto& shares : cases) {
    std::vector<float> sum(batch.x.size(), 0.0f);
    for (uint32_t i = 0; i < shares.size(); ++i) {
      Block block(experts, table, *AssignSegments(segments, shares, i), quantum, BlockOptions{});
      const std::vector<float> part = block.Run(batch);
      for (size_t j = 0; j < sum.size(); ++j) sum[j] += part[j];
    }
    EXPECT_LT(LargestError(sum, exact), 1e-5);
  }
}

TEST(RoutedExperts, WrongLimitsAreRefused) {
  FakeShape shape;
  const FakeExperts experts(shape, 18);
  Block block = WholeBlock(experts, kRefTable, 1);
  const auto code = [&](auto change) {
    shm::BatchLimits limits = block.Limits();
    change(limits);
    return block.engine().Configure(limits).code();
  };
  using L = shm::BatchLimits;
  EXPECT_EQ(code([](L& l) { l.hidden = 41; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.num_experts = 5; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.num_layers = 3; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.top_k = 5; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.top_k = 0; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L&) {}), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace tandem::expert
