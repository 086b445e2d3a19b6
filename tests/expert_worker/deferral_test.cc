// Deferred picks in the routed-expert block: what they sum to comes with the lane's next layer.

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/expert_worker/expert_fakes.h"
#include "tests/expert_worker/test_block.h"

namespace tandem::expert {
namespace {

constexpr uint32_t kTopK = 4;

FakeShape Shape() {
  FakeShape shape;
  shape.layers = 4;
  shape.moe_layers = {0, 1, 2, 3};
  shape.experts = 6;
  shape.dtype = DType::kBF16;
  return shape;
}

std::vector<uint8_t> RandomBits(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<uint8_t> bits(count);
  for (uint8_t& bit : bits) bit = rng() % 2;
  return bits;
}

// The batch without its deferred picks, or without the others.
Batch Part(const Batch& batch, bool deferred) {
  Batch part = batch;
  part.deferred.clear();
  for (size_t i = 0; i < part.ids.size(); ++i) {
    const bool is_deferred = !batch.deferred.empty() && batch.deferred[i] != 0;
    if (is_deferred != deferred) part.ids[i] = shm::kNoExpert;
  }
  return part;
}

std::vector<float> Sum(std::vector<float> a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

class DeferralTest : public ::testing::TestWithParam<shm::RowType> {
 protected:
  // All deferral rests on what a batch without deferred picks gives.
  std::vector<float> Plain(const Batch& batch, uint32_t layer) {
    return plain_.RunAt(batch, {.layer = layer, .step = ++plain_step_});
  }
  Batch Random(uint32_t rows, uint32_t seed) {
    Batch batch = RandomBatch(shape_, rows, kTopK, seed);
    batch.deferred = RandomBits(batch.ids.size(), seed + 100);
    return batch;
  }
  // Default mode adds in another order where the other half of the picks is there too.
  double tolerance() const { return GetParam() == shm::RowType::kF32 ? 0 : 2e-6; }
  Block MakeBlock() {
    return Block(experts_, *RunnableTables().front(), {.threads = 2, .row_type = GetParam()});
  }

  const FakeShape shape_ = Shape();
  const FakeExperts experts_{shape_, 3};
  Block block_ = MakeBlock();
  Block plain_ = MakeBlock();
  uint64_t plain_step_ = 1000;
};
INSTANTIATE_TEST_SUITE_P(Modes, DeferralTest,
                         ::testing::Values(shm::RowType::kF32, shm::RowType::kBf16),
                         [](const auto& info) {
                           return info.param == shm::RowType::kF32 ? "Parity" : "Default";
                         });

TEST_P(DeferralTest, SumsArriveWithTheNextLayer) {
  for (const uint32_t rows : {1u, 3u, 40u, 300u}) {
    std::vector<float> carry(size_t{rows} * shape_.hidden, 0.0f);
    for (uint32_t layer = 0; layer < 4; ++layer) {
      Batch batch = Random(rows, rows + layer);
      if (layer == 3) batch.deferred.clear();  // the last layer defers nothing, but takes
      const auto got = block_.RunAt(batch, {.layer = layer, .step = rows});
      const auto want = Sum(Plain(Part(batch, false), layer), carry);
      EXPECT_LE(LargestError(got, want), tolerance()) << "rows " << rows << " layer " << layer;
      carry = Plain(Part(batch, true), layer);
    }
  }
}

TEST_P(DeferralTest, LanesCarryTheirOwn) {
  std::vector<float> carry[2];
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (uint32_t lane = 0; lane < 2; ++lane) {
      const Batch batch = Random(lane + 2, 10 * layer + lane);
      const auto got = block_.RunAt(batch, {.layer = layer, .lane = lane, .step = 9});
      auto want = Plain(Part(batch, false), layer);
      if (layer == 1) want = Sum(want, carry[lane]);
      EXPECT_LE(LargestError(got, want), tolerance()) << layer << " " << lane;
      carry[lane] = Plain(Part(batch, true), layer);
    }
  }
}

TEST_P(DeferralTest, ACarryIsForItsStepEpochAndRowsOnly) {
  const Batch batch = Random(3, 21);
  const auto want = Plain(Part(batch, false), 1);
  const Batch fewer = Random(2, 22);
  const auto want_fewer = Plain(Part(fewer, false), 1);
  block_.RunAt(batch, {.layer = 0, .step = 1, .epoch = 1});
  EXPECT_LE(LargestError(block_.RunAt(batch, {.layer = 1, .step = 2, .epoch = 1}), want),
            tolerance());
  block_.RunAt(batch, {.layer = 0, .step = 3, .epoch = 1});
  EXPECT_LE(LargestError(block_.RunAt(batch, {.layer = 1, .step = 3, .epoch = 2}), want),
            tolerance());
  block_.RunAt(batch, {.layer = 0, .step = 4, .epoch = 2});
  EXPECT_LE(LargestError(block_.RunAt(fewer, {.layer = 1, .step = 4, .epoch = 2}), want_fewer),
            tolerance());
  // Taken once, gone.
  block_.RunAt(batch, {.layer = 0, .step = 5, .epoch = 2});
  block_.RunAt(Part(batch, false), {.layer = 1, .step = 5, .epoch = 2});
  EXPECT_LE(
      LargestError(block_.RunAt(Part(batch, false), {.layer = 1, .step = 5, .epoch = 2}), want),
      tolerance());
}

TEST_P(DeferralTest, AllPicksOrNoneMayBeDeferred) {
  Batch batch = Random(5, 31);
  batch.deferred.assign(batch.ids.size(), 1);
  const auto nothing = block_.RunAt(batch, {.layer = 0, .step = 1});
  EXPECT_EQ(nothing, std::vector<float>(nothing.size(), 0.0f));
  const auto all = Plain(Part(batch, true), 0);
  batch.deferred.assign(batch.ids.size(), 0);
  const auto got = block_.RunAt(batch, {.layer = 1, .step = 1});
  EXPECT_LE(LargestError(got, Sum(Plain(Part(batch, false), 1), all)), tolerance());
  const auto after = block_.RunAt(batch, {.layer = 2, .step = 1});
  EXPECT_LE(LargestError(after, Plain(Part(batch, false), 2)), tolerance());
}

TEST_P(DeferralTest, WithoutDeferredPicksBitsAreThoseOfNoDeferral) {
  Batch batch = Random(7, 41);
  batch.deferred.assign(batch.ids.size(), 0);
  const auto with = block_.RunAt(batch, {.layer = 1, .step = 1});
  batch.deferred.clear();
  const auto without = block_.RunAt(batch, {.layer = 1, .step = 2});
  EXPECT_LE(LargestError(with, without), tolerance());
  if (GetParam() == shm::RowType::kF32) {
    EXPECT_EQ(with, without);
  }
}

}  // namespace
}  // namespace tandem::expert
