// The frequencies of sampled tokens against the exact probabilities, with fixed seeds.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/gpu_worker/backend_cpu/sampler_test.h"

namespace tandem::gpu {
namespace {

constexpr int kDraws = 20'000;
constexpr int kRows = 200;

// Probabilities by definition: sort, cut by top_k, top_p, min_p in turn, renormalize.
std::vector<double> Exact(const std::vector<float>& logits, const SampleParams& p) {
  const size_t n = logits.size();
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> w(n);
  for (size_t i = 0; i < n; ++i) {
    w[i] = std::exp((double{logits[order[i]]} - logits[order[0]]) / p.temperature);
  }
  size_t kept = p.top_k > 0 ? std::min<size_t>(n, static_cast<size_t>(p.top_k)) : n;
  if (p.top_p < 1) {
    const double total = std::accumulate(w.begin(), w.begin() + kept, 0.0);
    double sum = 0;
    size_t i = 0;
    while (i < kept && (i == 0 || sum < p.top_p * total)) sum += w[i++];
    kept = i;
  }
  while (kept > 1 && w[kept - 1] < p.min_p) --kept;
  const double total = std::accumulate(w.begin(), w.begin() + kept, 0.0);
  std::vector<double> probability(n, 0.0);
  for (size_t i = 0; i < kept; ++i) probability[order[i]] = w[i] / total;
  return probability;
}

std::vector<int> Frequencies(Backend& backend, const std::vector<float>& logits,
                             const SampleParams& params, bool by_seed) {
  std::vector<int> frequency(logits.size());
  for (int batch = 0; batch < kDraws / kRows; ++batch) {
    SampleStep step(logits, params);
    for (int row = 0; row < kRows; ++row) {
      SampleParams next = params;
      const int index = batch * kRows + row;
      next.position = by_seed ? 3 : index;
      next.seed = by_seed ? static_cast<uint64_t>(index) : params.seed;
      if (row == 0) {
        step.params[0] = next;
      } else {
        step.AddRow(logits, next);
      }
    }
    for (const int32_t token : step.Run(backend)) ++frequency[token];
  }
  return frequency;
}

// Tokens expected less than 5 times are taken together.
void ExpectFits(const std::vector<int>& frequency, const std::vector<double>& probability) {
  double chi = 0, rest_expected = 0;
  int rest = 0, cells = 0;
  for (size_t i = 0; i < frequency.size(); ++i) {
    const double expected = probability[i] * kDraws;
    if (expected == 0) {
      ASSERT_EQ(frequency[i], 0) << "token " << i << " is cut off";
    } else if (expected < 5) {
      rest += frequency[i];
      rest_expected += expected;
    } else {
      chi += std::pow(frequency[i] - expected, 2) / expected;
      ++cells;
    }
  }
  if (rest_expected >= 5) {
    chi += std::pow(rest - rest_expected, 2) / rest_expected;
    ++cells;
  }
  // Wilson and Hilferty's approximation of the 99.99 % point.
  const double freedom = std::max(1, cells - 1);
  const double a = 2.0 / (9.0 * freedom);
  EXPECT_LT(chi, freedom * std::pow(1 - a + 3.719 * std::sqrt(a), 3)) << cells << " cells";
}

class SamplerDistributionTest : public ::testing::TestWithParam<SampleParams> {};
INSTANTIATE_TEST_SUITE_P(
    Settings, SamplerDistributionTest,
    ::testing::Values(
        SampleParams{.temperature = 1, .seed = 1}, SampleParams{.temperature = 0.6f, .seed = 2},
        SampleParams{.temperature = 1.7f, .top_k = 20, .seed = 3},
        SampleParams{.temperature = 1, .top_p = 0.9f, .seed = 4},
        SampleParams{.temperature = 1, .min_p = 0.05f, .seed = 5},
        SampleParams{.temperature = 1.2f, .top_k = 40, .top_p = 0.8f, .seed = 6},
        SampleParams{.temperature = 2, .top_k = 60, .top_p = 0.95f, .min_p = 0.1f, .seed = 7}));

TEST_P(SamplerDistributionTest, FitsTheExactProbabilities) {
  auto backend = MakeBackend();
  const std::vector<float> logits = RandomVector(1500, 77, 2.0f);
  const std::vector<double> probability = Exact(logits, GetParam());
  for (const bool by_seed : {false, true}) {
    SCOPED_TRACE(by_seed ? "one position, many seeds" : "one seed, many positions");
    ExpectFits(Frequencies(*backend, logits, GetParam(), by_seed), probability);
  }
}

}  // namespace
}  // namespace tandem::gpu
