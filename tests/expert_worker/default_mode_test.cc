// The routed-expert block in default mode: both plans, every format and table, against the
// double-precision sum of the exact weights.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/expert_worker/quantized_fakes.h"
#include "tests/expert_worker/test_block.h"

namespace tandem::expert {
namespace {

using kernels::ActivationForm;
using kernels::KernelTable;

constexpr int kTiled = 0;
constexpr int kFused = 1 << 20;

BlockOptions Default(int fused_rows, int threads = 2) {
  return {.threads = threads, .row_type = shm::RowType::kBf16, .fused_rows = fused_rows};
}

MatrixFormat Usual(WeightFormat format) { return {format, kernels::UsualGroup(format)}; }

// Of an element beside the block's largest. Rows and activations are rounded once each: to 1/254 of
// a group's largest (int8), to 2^-9 of themselves (BF16). The worst of the cases below are 0.023,
// 0.003 and, of F32 sums, 1.6e-6; all int8 tables have the same, since the rounding is the same.
double Bound(const KernelTable& table, const LayerFormat& formats) {
  double bound = 5e-6;
  for (const MatrixFormat& m : {formats.gate_up, formats.down}) {
    const ActivationForm form = table.format(m.format).form;
    bound = std::max(bound, form == ActivationForm::kInt8   ? 0.03
                            : form == ActivationForm::kBf16 ? 0.006
                                                            : 5e-6);
  }
  return bound;
}

double ErrorOf(const KnownExperts& experts, Block& block, const Batch& batch) {
  return LargestError(block.Run(batch),
                      ExpectedBlock(experts, 1, batch.x, batch.ids, batch.weights, batch.top_k));
}

class EveryFormat : public ::testing::TestWithParam<uint32_t> {};

TEST_P(EveryFormat, BothPlansComeCloseToTheExactSum) {
  const auto format = static_cast<WeightFormat>(GetParam());
  FakeShape shape;
  shape.hidden = 288;  // a super-block and a part of one
  shape.intermediate = 96;
  const QuantizedExperts experts(shape, Usual(format), Usual(format), GetParam() * 100);
  for (const KernelTable* table : RunnableTables()) {
    for (int plan : {kFused, kTiled}) {
      Block block(experts, *table, Default(plan));
      for (uint32_t rows : {1u, 3u, 21u}) {
        EXPECT_LT(ErrorOf(experts, block, RandomBatch(shape, rows, 2, rows)),
                  Bound(*table, {Usual(format), Usual(format)}))
            << table->name << (plan == kFused ? " fused, rows " : " tiled, rows ") << rows;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DefaultMode, EveryFormat, ::testing::Range(0u, kernels::kFormatCount),
                         [](const auto& info) {
                           return std::string(kernels::kFormatNames[info.param]);
                         });

TEST(DefaultMode, OddShapesAndNarrowSegments) {
  struct Case {
    uint32_t hidden, intermediate;
  };
  const LayerFormat mixes[] = {
      {Usual(WeightFormat::kQ4K), Usual(WeightFormat::kQ6K)},  // a GGUF "K_M" mix
      {Usual(WeightFormat::kInt4F16), Usual(WeightFormat::kInt4F16)},
      {{WeightFormat::kInt8F32, 0}, {WeightFormat::kInt8F32, 0}},
      {{WeightFormat::kFp8, 128}, {WeightFormat::kFp8, 128}},
      {{WeightFormat::kInt4Bf16, 128}, {WeightFormat::kInt4Bf16, 128}},
      {Usual(WeightFormat::kNvfp4), Usual(WeightFormat::kMxfp4)},
      {Usual(WeightFormat::kBf16), Usual(WeightFormat::kF32)},
  };
  for (const Case& c : {Case{33, 16}, Case{65, 50}, Case{257, 100}, Case{40, 513}}) {
    for (const LayerFormat& mix : mixes) {
      FakeShape shape;
      shape.hidden = c.hidden;
      shape.intermediate = c.intermediate;
      const QuantizedExperts experts(shape, mix.gate_up, mix.down, c.hidden);
      for (const KernelTable* table : RunnableTables()) {
        for (int plan : {kFused, kTiled}) {
          Block block(experts, *table, Default(plan, 3));
          EXPECT_LT(ErrorOf(experts, block, RandomBatch(shape, 9, 3, 4)), 2 * Bound(*table, mix))
              << table->name << " hidden " << c.hidden << " intermediate " << c.intermediate
              << " gate/up " << kernels::kFormatNames[static_cast<int>(mix.gate_up.format)]
              << (plan == kFused ? " fused" : " tiled");
        }
      }
    }
  }
}

// What follows holds for every plan.
class DefaultPlan : public ::testing::TestWithParam<int> {
 protected:
  DefaultPlan() { shape_.intermediate = 77; }

  FakeShape shape_;
  const KernelTable& table_ = *RunnableTables().front();
  const MatrixFormat int4_ = Usual(WeightFormat::kInt4F16);
};

TEST_P(DefaultPlan, NoRowsAndLayersWithoutExperts) {
  const QuantizedExperts experts(shape_, int4_, int4_, 1);
  Block block(experts, table_, Default(GetParam()));
  EXPECT_TRUE(block.Run(Batch{.rows = 0, .top_k = 2, .x = {}, .ids = {}, .weights = {}}).empty());
  const Batch batch = RandomBatch(shape_, 5, 2, 2);
  EXPECT_EQ(block.Run(batch, 0), std::vector<float>(batch.x.size(), 0.0f));
}

TEST_P(DefaultPlan, AllRowsOnOneExpert) {
  const QuantizedExperts experts(shape_, int4_, int4_, 2);
  Block block(experts, table_, Default(GetParam()));
  Batch batch = RandomBatch(shape_, 300, 1, 3);
  std::fill(batch.ids.begin(), batch.ids.end(), uint16_t{2});
  EXPECT_LT(ErrorOf(experts, block, batch), 0.03);
  EXPECT_GT(block.ticks.load(), 0u);
}

TEST_P(DefaultPlan, SkippedPicksCountForNothing) {
  const QuantizedExperts experts(shape_, int4_, int4_, 3);
  Block block(experts, table_, Default(GetParam()));
  Batch batch = RandomBatch(shape_, 9, 3, 4);
  for (uint32_t i = 0; i < batch.ids.size(); i += 2) {
    batch.ids[i] = i % 4 == 0 ? shm::kNoExpert : static_cast<uint16_t>(shape_.experts);
    batch.weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  EXPECT_LT(ErrorOf(experts, block, batch), 0.03);
  std::fill(batch.ids.begin(), batch.ids.end(), shm::kNoExpert);
  EXPECT_EQ(block.Run(batch), std::vector<float>(batch.x.size(), 0.0f));
}

TEST_P(DefaultPlan, NanStaysInItsRow) {
  for (const WeightFormat format :
       {WeightFormat::kInt4F16, WeightFormat::kBf16, WeightFormat::kFp8, WeightFormat::kQ4K}) {
    const QuantizedExperts experts(shape_, Usual(format), Usual(format), 4);
    Block block(experts, table_, Default(GetParam()));
    Batch batch = RandomBatch(shape_, 8, 2, 5);
    const std::vector<float> clean = block.Run(batch);
    batch.x[2 * shape_.hidden + 5] = std::numeric_limits<float>::quiet_NaN();
    batch.x[6 * shape_.hidden + 1] = std::numeric_limits<float>::infinity();
    batch.weights[4 * 2] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> out = block.Run(batch);
    for (uint32_t r = 0; r < batch.rows; ++r) {
      for (uint32_t c = 0; c < shape_.hidden; ++c) {
        const size_t i = r * shape_.hidden + c;
        if (r == 2 || r == 4 || r == 6) {
          EXPECT_FALSE(std::isfinite(out[i])) << r << " " << c;
        } else {
          EXPECT_NEAR(out[i], clean[i], 1e-4f + 1e-5f * std::fabs(clean[i])) << r << " " << c;
        }
      }
    }
  }
}

TEST_P(DefaultPlan, OtherRowsMoveAResultByRoundingOnly) {
  const QuantizedExperts experts(shape_, int4_, int4_, 5);
  Block block(experts, table_, Default(GetParam()));
  const Batch batch = RandomBatch(shape_, 40, 3, 6);
  const std::vector<float> together = block.Run(batch);
  for (uint32_t r = 0; r < batch.rows; r += 7) {
    const std::vector<float> alone = block.Run(OneRow(batch, r));
    const auto begin = together.begin() + r * shape_.hidden;
    const std::vector<float> same(begin, begin + shape_.hidden);
    EXPECT_LT(LargestError(alone, same), 1e-5) << "row " << r;
  }
}

TEST_P(DefaultPlan, WorkersWithUnevenSharesSumToTheWhole) {
  shape_.biases = true;
  shape_.activation = {.limit = 7.0f, .alpha = 1.702f, .up_offset = 1.0f};
  shape_.dtype = DType::kBF16;
  const FakeExperts plain(shape_, 6);
  shape_.biases = false;
  const QuantizedExperts quantized(shape_, int4_, int4_, 6);
  for (const KnownExperts* experts :
       {static_cast<const KnownExperts*>(&plain), static_cast<const KnownExperts*>(&quantized)}) {
    const Batch batch = RandomBatch(shape_, 12, 3, 7);
    const std::vector<float> whole = Block(*experts, table_, Default(GetParam())).Run(batch);
    const std::vector<std::vector<uint32_t>> cases = {{1, 1}, {3, 1}, {0, 1}, {1, 0, 5}};
    for (const auto& shares : cases) {
      std::vector<float> sum(batch.x.size(), 0.0f);
      for (uint32_t i = 0; i < shares.size(); ++i) {
        Block part(*experts, table_, *AssignSegments(experts->all().size(), shares, i),
                   experts->quantum(), Default(GetParam()));
        const std::vector<float> out = part.Run(batch);
        for (size_t j = 0; j < sum.size(); ++j) sum[j] += out[j];
      }
      EXPECT_LT(LargestError(sum, whole), 1e-5);
    }
  }
}

TEST_P(DefaultPlan, BiasesAndClampedActivation) {
  shape_.biases = true;
  shape_.activation = {.limit = 1.5f, .alpha = 1.702f, .up_offset = 1.0f};
  const FakeExperts experts(shape_, 7);
  for (const KernelTable* table : RunnableTables()) {
    Block block(experts, *table, Default(GetParam()));
    EXPECT_LT(ErrorOf(experts, block, RandomBatch(shape_, 17, 3, 8)), 1e-5) << table->name;
  }
}

TEST_P(DefaultPlan, MoreThreadsThanWork) {
  const QuantizedExperts experts(shape_, int4_, int4_, 8);
  Block block(experts, table_, Default(GetParam(), 7));
  EXPECT_LT(ErrorOf(experts, block, RandomBatch(shape_, 1, 1, 9)), 0.03);
}

INSTANTIATE_TEST_SUITE_P(BothPlans, DefaultPlan, ::testing::Values(kFused, kTiled),
                         [](const auto& info) { return info.param == kFused ? "Fused" : "Tiled"; });

}  // namespace
}  // namespace tandem::expert
