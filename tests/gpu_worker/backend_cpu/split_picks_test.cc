#include <algorithm>
#include <numeric>
#include <random>

#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

constexpr int kExperts = 40;

struct Split {
  std::vector<uint16_t> worker_ids;
  std::vector<uint16_t> slots;
  std::vector<uint8_t> deferred;
  std::vector<PickSums> sums;
};

struct Input {
  int top_k = 0;
  std::vector<uint16_t> ids;
  std::vector<float> weights;
};

class SplitPicksTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  Split Run(const Input& input, SplitPicksArgs args = {}) {
    const size_t picks = input.ids.size();
    const auto rows = static_cast<int>(picks) / input.top_k;
    Split out{std::vector<uint16_t>(picks, 7777), std::vector<uint16_t>(picks, 7777),
              std::vector<uint8_t>(picks, 77), std::vector<PickSums>(static_cast<size_t>(rows))};
    args.rows.bound = rows;
    args.ids = input.ids.data();
    args.weights = input.weights.data();
    args.experts = kExperts;
    args.top_k = input.top_k;
    args.worker_ids = out.worker_ids.data();
    args.resident_slots = out.slots.data();
    args.deferred = out.deferred.data();
    args.sums = out.sums.data();
    backend_->SplitPicks(args);
    return out;
  }
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, SplitPicksTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

Input RandomPicks(int rows, int top_k, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> uniform(0.01f, 1.0f);
  Input input{.top_k = top_k, .ids = {}, .weights = {}};
  for (int r = 0; r < rows; ++r) {
    std::vector<uint16_t> all(kExperts);
    std::iota(all.begin(), all.end(), uint16_t{0});
    std::shuffle(all.begin(), all.end(), rng);
    input.ids.insert(input.ids.end(), all.begin(), all.begin() + top_k);
    for (int i = 0; i < top_k; ++i) input.weights.push_back(uniform(rng));
  }
  return input;
}

// The rule written once more, by sorting.
std::vector<uint8_t> Deferred(const Input& input, size_t row, const DeferralLimits& limits,
                              const std::vector<uint16_t>& slot_of_expert) {
  const auto k = static_cast<size_t>(input.top_k);
  std::vector<size_t> order;
  double total = 0;
  for (size_t i = 0; i < k; ++i) {
    const uint16_t id = input.ids[row * k + i];
    if (id == kNoExpert) continue;
    total += input.weights[row * k + i];
    if (slot_of_expert.empty() || slot_of_expert[id] == kNoExpert) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return input.weights[row * k + a] < input.weights[row * k + b];
  });
  std::vector<uint8_t> deferred(k, 0);
  double mass = 0;
  for (size_t n = 0; n < order.size() && n < static_cast<size_t>(limits.max_deferred); ++n) {
    mass += input.weights[row * k + order[n]];
    if (mass > limits.max_mass * total) break;
    deferred[order[n]] = 1;
  }
  return deferred;
}

TEST_P(SplitPicksTest, DefersTheLightestWithinBothLimits) {
  const Input input = RandomPicks(33, 8, 5);
  std::vector<uint16_t> slots(kExperts, kNoExpert);
  for (const uint16_t e : {0, 3, 7, 8, 21}) slots[e] = static_cast<uint16_t>(e + 100);
  for (const bool resident : {false, true}) {
    for (const DeferralLimits limits :
         {DeferralLimits{0, 1}, {1, 1}, {3, 1}, {8, 1}, {8, 0.3f}, {2, 0.05f}, {3, 0}}) {
      SplitPicksArgs args;
      args.limits = &limits;
      if (resident) args.slot_of_expert = slots.data();
      const Split split = Run(input, args);
      for (size_t row = 0; row < 33; ++row) {
        const auto want = Deferred(input, row, limits, resident ? slots : std::vector<uint16_t>{});
        const std::vector<uint8_t> got(split.deferred.begin() + static_cast<int64_t>(row * 8),
                                       split.deferred.begin() + static_cast<int64_t>(row * 8 + 8));
        ASSERT_EQ(got, want) << row << " " << limits.max_deferred << " " << limits.max_mass;
        EXPECT_EQ(split.sums[row].deferred, std::accumulate(want.begin(), want.end(), 0));
        EXPECT_LE(split.sums[row].deferred_mass, limits.max_mass + 1e-6f);
      }
    }
  }
}

TEST_P(SplitPicksTest, ResidentsGoToTheirSlotsAndTheRestToTheWorkers) {
  const Input input = RandomPicks(5, 6, 9);
  std::vector<uint16_t> slots(kExperts, kNoExpert);
  for (int e = 0; e < kExperts; e += 2) slots[e] = static_cast<uint16_t>(e / 2);
  SplitPicksArgs args;
  args.slot_of_expert = slots.data();
  const Split split = Run(input, args);
  int residents = 0;
  for (size_t i = 0; i < input.ids.size(); ++i) {
    const uint16_t slot = slots[input.ids[i]];
    EXPECT_EQ(split.slots[i], slot);
    EXPECT_EQ(split.worker_ids[i], slot == kNoExpert ? input.ids[i] : kNoExpert);
    EXPECT_EQ(split.deferred[i], 0);
    residents += slot == kNoExpert ? 0 : 1;
  }
  int counted = 0;
  for (const PickSums& sums : split.sums) counted += sums.resident;
  EXPECT_EQ(counted, residents);
}

TEST_P(SplitPicksTest, OnlyRowsThatMayDeferDo) {
  const Input input = RandomPicks(4, 4, 3);
  const DeferralLimits limits{2, 1};
  const std::vector<uint8_t> may = {1, 0, 0, 1};
  SplitPicksArgs args;
  args.limits = &limits;
  args.may_defer = may.data();
  const Split split = Run(input, args);
  for (size_t row = 0; row < 4; ++row) EXPECT_EQ(split.sums[row].deferred, may[row] * 2);
}

TEST_P(SplitPicksTest, RowsWithoutNumbersDeferNothing) {
  Input input{.top_k = 2, .ids = {kNoExpert, kNoExpert, 4, 5}, .weights = {0, 0, 0.25f, 0.25f}};
  const DeferralLimits limits{1, 1};
  SplitPicksArgs args;
  args.limits = &limits;
  const Split split = Run(input, args);
  // Of equal weights the later rank goes first.
  EXPECT_EQ(split.deferred, (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_EQ(split.worker_ids, input.ids);
  EXPECT_FLOAT_EQ(split.sums[1].deferred_mass, 0.5f);
}

}  // namespace
}  // namespace tandem::gpu
