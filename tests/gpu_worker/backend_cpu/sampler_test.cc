#include "tests/gpu_worker/backend_cpu/sampler_test.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tandem::gpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class SamplerTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  int32_t Sample(std::vector<float> logits, const SampleParams& params) {
    return SampleStep(std::move(logits), params).Run(*backend_)[0];
  }
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, SamplerTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

TEST_P(SamplerTest, GreedyTakesTheLargestAndTheLowestIdOfTies) {
  for (const size_t vocab : {1u, 63u, 64u, 65u, 1000u, 151'936u}) {
    std::vector<float> logits = RandomVector(vocab, 1);
    const auto expected = std::max_element(logits.begin(), logits.end()) - logits.begin();
    EXPECT_EQ(Sample(logits, {}), expected);
    std::fill(logits.begin(), logits.end(), -2.5f);
    EXPECT_EQ(Sample(logits, {}), 0);
    logits.back() = -2.0f;
    EXPECT_EQ(Sample(logits, {}), static_cast<int32_t>(vocab - 1));
  }
}

TEST_P(SamplerTest, RowsThatAreNotFiniteGiveMinusOneAndLeaveOthersAlone) {
  for (const float bad : {std::nanf(""), kInfinity, -kInfinity}) {
    for (const float temperature : {0.0f, 1.0f}) {
      const SampleParams params{.temperature = temperature, .seed = 5};
      const std::vector<float> clean = RandomVector(300, 2);
      std::vector<float> dirty = clean;
      dirty[299] = bad;
      SampleStep step(clean, params);
      step.AddRow(dirty, params);
      step.AddRow(clean, params);
      const std::vector<int32_t> tokens = step.Run(*backend_);
      EXPECT_EQ(tokens[1], -1);
      EXPECT_EQ(tokens[0], Sample(clean, params));
      EXPECT_EQ(tokens[2], tokens[0]);
    }
  }
}

TEST_P(SamplerTest, BiasAndBansMoveTheChoice) {
  SampleStep step({1, 2, 3, 4}, {.bias_begin = 1, .bias_end = 3});
  step.bias_ids = {3, 0, 77, 2};
  step.bias_values = {100, 5, 100, 100};
  EXPECT_EQ(step.Run(*backend_)[0], 0) << "entries 1 and 2 apply, an unknown id is ignored";
  EXPECT_EQ(step.logits, (std::vector<float>{6, 2, 3, 4}));

  SampleStep bans({1, 2, 3, 4}, {.banned_begin = 0, .banned_end = 2});
  bans.banned_ids = {3, 2, 1};
  EXPECT_EQ(bans.Run(*backend_)[0], 1);
  bans = SampleStep({1, 2}, {.banned_begin = 0, .banned_end = 2});
  bans.banned_ids = {0, 1};
  EXPECT_EQ(bans.Run(*backend_)[0], -1) << "nothing is left";
}

TEST_P(SamplerTest, TheMaskHasOneBitAToken) {
  std::vector<float> logits = RandomVector(70, 3);
  std::vector<uint32_t> mask = {0, 1u << 8 | 1u << 9, 1u << 5};
  const SampleParams params{.mask = mask.data()};
  const int32_t allowed[] = {40, 41, 69};
  const int32_t best = *std::max_element(std::begin(allowed), std::end(allowed),
                                         [&](int a, int b) { return logits[a] < logits[b]; });
  EXPECT_EQ(Sample(logits, params), best);
  SampleParams drawn = params;
  drawn.temperature = 50;
  for (int64_t position = 0; position < 100; ++position) {
    drawn.position = position;
    const int32_t token = Sample(logits, drawn);
    ASSERT_TRUE(token == 40 || token == 41 || token == 69) << token;
  }
}

TEST_P(SamplerTest, PenaltiesFollowTheirFormulas) {
  constexpr uint32_t kInPrompt = 0x80000000u;
  const std::vector<float> logits = {2, -2, 2, 2, -2, 1};
  SampleStep step(logits, {.presence_penalty = 0.5f,
                           .frequency_penalty = 0.25f,
                           .repetition_penalty = 2.0f,
                           .counts_row = 1});
  // Row 0 belongs to another sequence.
  step.token_counts = {9, 9, 9, 9, 9, 9, 0, kInPrompt, kInPrompt | 3, 2, 1, kInPrompt};
  step.Run(*backend_);
  EXPECT_EQ(step.logits[0], 2.0f);
  EXPECT_EQ(step.logits[1], -4.0f) << "prompt only: repetition, a negative logit grows";
  EXPECT_EQ(step.logits[2], 1.0f - 0.75f - 0.5f);
  EXPECT_EQ(step.logits[3], 1.0f - 0.5f - 0.5f);
  EXPECT_EQ(step.logits[4], -4.0f - 0.25f - 0.5f);
  EXPECT_EQ(step.logits[5], 0.5f);
  SampleStep off(logits, {.presence_penalty = 0.5f, .counts_row = -1});
  off.Run(*backend_);
  EXPECT_EQ(off.logits, logits);
}

// The tokens that ever come out over many positions.
std::vector<int32_t> Support(Backend& backend, const std::vector<float>& logits,
                             SampleParams params) {
  std::vector<int32_t> seen;
  SampleStep step(logits, params);
  for (int i = 1; i < 200; ++i) {
    params.position = i;
    step.AddRow(logits, params);
  }
  for (const int32_t token : step.Run(backend)) {
    if (std::find(seen.begin(), seen.end(), token) == seen.end()) seen.push_back(token);
  }
  std::sort(seen.begin(), seen.end());
  return seen;
}

TEST_P(SamplerTest, TopKKeepsTheBestAndTheLowestIdsOfTies) {
  const std::vector<float> logits = {1.0f, 1.2f, 1.1f, 1.2f, 1.1f, 1.1f};
  const auto support = [&](int32_t top_k) {
    return Support(*backend_, logits, {.temperature = 1, .top_k = top_k, .seed = 1});
  };
  EXPECT_EQ(support(1), (std::vector<int32_t>{1}));
  EXPECT_EQ(support(2), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(support(4), (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(support(6).size(), 6u);
  EXPECT_EQ(support(0).size(), 6u) << "0 is off";
  EXPECT_EQ(support(100).size(), 6u);
}

TEST_P(SamplerTest, TopPKeepsTheShortestPrefix) {
  // Probabilities 0.4, 0.3, 0.2, 0.1 of ids 2, 0, 3, 1.
  const std::vector<float> logits = {std::log(0.3f), std::log(0.1f), std::log(0.4f),
                                     std::log(0.2f)};
  const auto support = [&](float top_p, int32_t top_k = 0) {
    return Support(*backend_, logits,
                   {.temperature = 1, .top_k = top_k, .top_p = top_p, .seed = 2});
  };
  EXPECT_EQ(support(0.0f), (std::vector<int32_t>{2}));
  EXPECT_EQ(support(0.39f), (std::vector<int32_t>{2}));
  EXPECT_EQ(support(0.45f), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(support(0.75f), (std::vector<int32_t>{0, 2, 3}));
  EXPECT_EQ(support(0.95f).size(), 4u);
  // After top_k 2 the probabilities are 4/7 and 3/7.
  EXPECT_EQ(support(0.5f, 2), (std::vector<int32_t>{2}));
  EXPECT_EQ(support(0.6f, 2), (std::vector<int32_t>{0, 2}));
}

TEST_P(SamplerTest, MinPIsRelativeToTheBestToken) {
  const std::vector<float> logits = {std::log(0.3f), std::log(0.1f), std::log(0.4f),
                                     std::log(0.2f)};
  const auto support = [&](float min_p, float top_p = 1, int32_t top_k = 0) {
    return Support(*backend_, logits,
                   {.temperature = 1, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = 3});
  };
  EXPECT_EQ(support(1.0f), (std::vector<int32_t>{2}));
  EXPECT_EQ(support(0.7f), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(support(0.45f), (std::vector<int32_t>{0, 2, 3}));
  EXPECT_EQ(support(0.7f, 0.99f), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(support(0.7f, 1, 3), (std::vector<int32_t>{0, 2}));
}

TEST_P(SamplerTest, ADrawDependsOnItsSeedAndPositionOnly) {
  const std::vector<float> logits = RandomVector(5000, 4);
  const SampleParams params{.temperature = 1, .top_p = 0.9f, .seed = 42, .position = 17};
  const int32_t alone = Sample(logits, params);
  SampleStep step(RandomVector(5000, 5), {.temperature = 2, .seed = 1});
  for (int i = 0; i < 20; ++i) {
    step.AddRow(RandomVector(5000, 100 + i),
                {.temperature = 0.5f, .top_k = i, .seed = static_cast<uint64_t>(i)});
    if (i == 12) step.AddRow(logits, params);
  }
  EXPECT_EQ(step.Run(*backend_)[14], alone);
  int distinct = 0;
  for (int i = 0; i < 20; ++i) {
    SampleParams other = params;
    (i % 2 == 0 ? other.position : reinterpret_cast<int64_t&>(other.seed)) += i + 1;
    distinct += Sample(logits, other) != alone ? 1 : 0;
  }
  EXPECT_GT(distinct, 15);
}

TEST_P(SamplerTest, EveryPathGivesTheTokensOfTheScalarKernels) {
  auto ref = MakeBackend({1, Isa::kRef});
  const std::vector<float> logits = RandomVector(20'011, 6, 3.0f);
  for (const SampleParams& params :
       {SampleParams{.temperature = 1}, SampleParams{.temperature = 0.7f, .top_k = 50},
        SampleParams{.temperature = 1.3f, .top_p = 0.95f},
        SampleParams{.temperature = 1, .min_p = 0.01f},
        SampleParams{.temperature = 2, .top_k = 5000, .top_p = 0.8f, .min_p = 0.001f}}) {
    SampleStep step(logits, params);
    for (int i = 1; i < 10; ++i) {
      SampleParams next = params;
      next.position = i;
      step.AddRow(logits, next);
    }
    SampleStep copy = step;
    EXPECT_EQ(step.Run(*backend_), copy.Run(*ref));
  }
}

TEST_P(SamplerTest, TinyTemperaturesAreGreedyInEffect) {
  const std::vector<float> logits = RandomVector(1000, 7);
  const int32_t best = Sample(logits, {});
  for (const float temperature : {1e-30f, 1e-6f, 1e-4f}) {
    EXPECT_EQ(Sample(logits, {.temperature = temperature, .seed = 9}), best);
  }
}

}  // namespace
}  // namespace tandem::gpu
