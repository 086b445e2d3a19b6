#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

struct Picks {
  std::vector<uint16_t> ids;
  std::vector<float> weights;
};

class RouterTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  Picks Route(const std::vector<float>& logits, RouterArgs args) {
    const auto rows = static_cast<int>(logits.size()) / args.experts;
    Picks picks;
    picks.ids.resize(static_cast<size_t>(rows * args.top_k));
    picks.weights.resize(picks.ids.size());
    args.rows.bound = rows;
    args.logits = AsMatrix(logits, args.experts);
    args.ids = picks.ids.data();
    args.weights = picks.weights.data();
    backend_->Router(args);
    return picks;
  }
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, RouterTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

RouterArgs Softmax(int experts, int top_k) {
  RouterArgs args;
  args.experts = experts;
  args.top_k = top_k;
  return args;
}

TEST_P(RouterTest, GivesDescendingScoresOfTheBestExperts) {
  const int experts = 129, top_k = 8, rows = 30;
  const std::vector<float> logits = RandomVector(rows * experts, 1, 2.0f);
  for (const bool sigmoid : {false, true}) {
    RouterArgs args = Softmax(experts, top_k);
    args.sigmoid = sigmoid;
    args.factor = 1.5f;
    const Picks picks = Route(logits, args);
    for (int r = 0; r < rows; ++r) {
      std::vector<int> order(experts);
      for (int e = 0; e < experts; ++e) order[e] = e;
      const float* row = logits.data() + r * experts;
      std::sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
      double sum = 0;
      const auto score = [&](int e) {
        return sigmoid ? 1 / (1 + std::exp(-double{row[e]})) : std::exp(double{row[e]});
      };
      for (int i = 0; i < top_k; ++i) sum += score(order[i]);
      for (int i = 0; i < top_k; ++i) {
        ASSERT_EQ(picks.ids[r * top_k + i], order[i]);
        ASSERT_NEAR(picks.weights[r * top_k + i], 1.5 * score(order[i]) / sum, 1e-6);
      }
    }
  }
}

TEST_P(RouterTest, BreaksTiesByTheLowestIndex) {
  RouterArgs args = Softmax(8, 3);
  EXPECT_EQ(Route({0, 1, 1, 0, 1, 1, 0, 0}, args).ids, (std::vector<uint16_t>{1, 2, 4}));
  // Saturated sigmoids are equal whatever their logits.
  args.sigmoid = true;
  EXPECT_EQ(Route({0, 90, 80, 0, 100, 0, 0, 0}, args).ids, (std::vector<uint16_t>{1, 2, 4}));
}

TEST_P(RouterTest, TheBiasSelectsButDoesNotWeigh) {
  const std::vector<float> bias = {0, 0, 0, 1};
  RouterArgs args = Softmax(4, 2);
  args.sigmoid = true;
  args.selection_bias = bias.data();
  args.renormalize = false;
  const Picks picks = Route({2, 1, 0, -3}, args);
  EXPECT_EQ(picks.ids, (std::vector<uint16_t>{3, 0}));
  EXPECT_NEAR(picks.weights[0], 1 / (1 + std::exp(3.0)), 1e-7);
  EXPECT_NEAR(picks.weights[1], 1 / (1 + std::exp(-2.0)), 1e-7);
}

TEST_P(RouterTest, GroupsOutsideTheKeptOnesAreOutEvenWhenScoresAreNegative) {
  // Selection scores: group 0 {-1, -2}, group 1 {-0.5, -5}, group 2 {-3, -3}; group sums -3, -5.5,
  // -6.
  const std::vector<float> bias = {-1.5f, -2.5f, -1.0f, -5.5f, -3.5f, -3.5f};
  RouterArgs args = Softmax(6, 2);
  args.sigmoid = true;
  args.selection_bias = bias.data();
  args.groups = 3;
  args.groups_kept = 1;
  const std::vector<float> zero_logits(6, 0.0f);
  EXPECT_EQ(Route(zero_logits, args).ids, (std::vector<uint16_t>{0, 1}));
  args.group_score_max = true;
  EXPECT_EQ(Route(zero_logits, args).ids, (std::vector<uint16_t>{2, 3}));
}

TEST_P(RouterTest, RowsThatAreNotFiniteGetSentinelsAndLeaveOthersAlone) {
  const int experts = 64;
  const std::vector<float> clean = RandomVector(4 * experts, 2);
  const Picks expected = Route(clean, Softmax(experts, 4));
  std::vector<float> dirty = clean;
  dirty[1 * experts + 63] = std::nanf("");
  dirty[2 * experts] = std::numeric_limits<float>::infinity();
  const Picks picks = Route(dirty, Softmax(experts, 4));
  for (int r = 0; r < 4; ++r) {
    for (int i = r * 4; i < r * 4 + 4; ++i) {
      const bool bad = r == 1 || r == 2;
      EXPECT_EQ(picks.ids[i], bad ? kNoExpert : expected.ids[i]);
      EXPECT_EQ(picks.weights[i], bad ? 0.0f : expected.weights[i]);
    }
  }
}

TEST_P(RouterTest, GivesTheBitsOfTheScalarKernels) {
  const std::vector<float> logits = RandomVector(50 * 200, 3, 4.0f);
  const Picks picks = Route(logits, Softmax(200, 6));
  backend_ = MakeBackend({1, Isa::kRef});
  const Picks ref = Route(logits, Softmax(200, 6));
  EXPECT_EQ(picks.ids, ref.ids);
  ExpectSameBits(picks.weights, ref.weights);
}

}  // namespace
}  // namespace tandem::gpu
