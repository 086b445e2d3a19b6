#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kMaxTop = 20;

struct Result {
  std::vector<float> logprobs, top_logprobs;
  std::vector<int32_t> ranks, top_ids;
};

class LogprobsTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  Result Compute(const std::vector<float>& logits, int64_t vocab,
                 const std::vector<int32_t>& targets, const std::vector<int32_t>& top) {
    Result result;
    result.logprobs.assign(targets.size(), -7.0f);
    result.ranks.assign(targets.size(), -7);
    result.top_ids.assign(targets.size() * kMaxTop, -7);
    result.top_logprobs.assign(targets.size() * kMaxTop, -7.0f);
    LogprobsArgs args;
    args.rows.bound = static_cast<int>(targets.size());
    args.logits = AsMatrix(logits, vocab);
    args.vocab = vocab;
    args.targets = targets.data();
    args.top = top.data();
    args.max_top = kMaxTop;
    args.target_logprobs = result.logprobs.data();
    args.target_ranks = result.ranks.data();
    args.top_ids = result.top_ids.data();
    args.top_logprobs = result.top_logprobs.data();
    backend_->Logprobs(args);
    return result;
  }
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, LogprobsTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

TEST_P(LogprobsTest, MatchesTheReferenceOverOddVocabularies) {
  for (const int vocab : {5, 64, 1025, 9973}) {
    const std::vector<float> logits = RandomVector(2 * vocab, 1, 5.0f);
    const std::vector<int32_t> targets = {vocab - 1, vocab / 2};
    const Result result = Compute(logits, vocab, targets, {kMaxTop, 3});
    for (int r = 0; r < 2; ++r) {
      const float* row = logits.data() + r * vocab;
      double sum = 0;
      for (int i = 0; i < vocab; ++i) sum += std::exp(double{row[i]});
      std::vector<int32_t> order(vocab);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
      EXPECT_NEAR(result.logprobs[r], row[targets[r]] - std::log(sum), 2e-6);
      const auto at = std::find(order.begin(), order.end(), targets[r]);
      EXPECT_EQ(result.ranks[r], at - order.begin() + 1);
      const int wanted = std::min(r == 0 ? kMaxTop : 3, vocab);
      for (int i = 0; i < wanted; ++i) {
        ASSERT_EQ(result.top_ids[r * kMaxTop + i], order[i]);
        ASSERT_NEAR(result.top_logprobs[r * kMaxTop + i], row[order[i]] - std::log(sum), 2e-6);
      }
      if (r == 1) {
        EXPECT_EQ(result.top_ids[kMaxTop + 3], -7) << "not asked for";
      }
      if (r == 0 && vocab < kMaxTop) {
        EXPECT_EQ(result.top_ids[vocab], -1) << "no such token";
      }
    }
  }
}

TEST_P(LogprobsTest, TiesGoToTheLowestIdAndSkippedRowsStayUntouched) {
  const std::vector<float> logits = {1, 3, 3, 3, 0, 1, 2, 3, 4, 5};
  const Result result = Compute(logits, 5, {2, -1}, {2, 3});
  EXPECT_EQ(result.ranks[0], 2);
  EXPECT_EQ(result.top_ids[0], 1);
  EXPECT_EQ(result.top_ids[1], 2);
  EXPECT_EQ(result.ranks[1], -7);
  EXPECT_EQ(result.logprobs[1], -7.0f);
  EXPECT_EQ(result.top_ids[kMaxTop], -7);
}

TEST_P(LogprobsTest, MaskedTokensAreMinusInfinity) {
  const Result result = Compute({0, -kInfinity, 0, -kInfinity}, 4, {1}, {4});
  EXPECT_EQ(result.logprobs[0], -kInfinity);
  EXPECT_EQ(result.ranks[0], 3);
  EXPECT_NEAR(result.top_logprobs[0], -std::log(2.0), 1e-6);
  EXPECT_EQ(result.top_logprobs[3], -kInfinity);
}

TEST_P(LogprobsTest, RowsThatAreNotFiniteSaySo) {
  for (const float bad : {std::nanf(""), kInfinity}) {
    const Result result = Compute({0, bad, 0, 1, 2, 3}, 3, {0, 2}, {2, 1});
    EXPECT_TRUE(std::isnan(result.logprobs[0]));
    EXPECT_EQ(result.ranks[0], 0);
    EXPECT_EQ(result.top_ids[0], -1);
    EXPECT_EQ(result.top_ids[kMaxTop], 2);
    EXPECT_EQ(result.ranks[1], 1);
  }
}

}  // namespace
}  // namespace tandem::gpu
