// The golden models in parity mode: logits, hidden states, router choices and greedy tokens against
// the reference, however prompts are cut and whoever shares the batch.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "tests/gpu_worker/golden_model.h"
#include "tests/testing/shared_data.h"

namespace tandem::gpu {
namespace {

constexpr uint32_t kNewTokens = 24;

class GoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Load(const GoldenOptions& options) {
    const auto dir = tandem::testing::SharedPath("golden/models/" + GetParam());
    if (!dir) GTEST_SKIP() << "no golden/models/" << GetParam();
    auto model = GoldenModel::Load(dir->string(), options);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = std::move(*model);
  }
  GoldenDriver::Feed Feed(int sequence, uint64_t id, int first_block) const {
    return {.id = id,
            .prompt = model_->Ids("seq" + std::to_string(sequence) + ".ids"),
            .first_block = first_block};
  }
  void ExpectLogits(const Trace& trace, const std::string& name, uint32_t first_position) const;
  void ExpectHidden(const Trace& trace) const;
  void ExpectPicks(const Trace& trace) const;

  std::unique_ptr<GoldenModel> model_;
};

class GoldenMoeTest : public GoldenTest {};

float Largest(const std::vector<float>& values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

void GoldenTest::ExpectLogits(const Trace& trace, const std::string& name,
                              uint32_t first_position) const {
  const std::vector<float> expected = model_->Floats(name);
  const auto vocab = static_cast<size_t>(model_->spec().vocab);
  const float bound = 1e-4f * Largest(expected);
  float worst = 0;
  for (size_t row = 0; row < expected.size() / vocab; ++row) {
    const auto found = trace.logits.find(first_position + static_cast<uint32_t>(row));
    ASSERT_NE(found, trace.logits.end()) << name << " position " << row;
    for (size_t i = 0; i < vocab; ++i) {
      worst = std::max(worst, std::fabs(found->second[i] - expected[row * vocab + i]));
    }
  }
  EXPECT_LE(worst, bound) << name;
  ::testing::Test::RecordProperty(name, std::to_string(worst / Largest(expected)));
}

void GoldenTest::ExpectHidden(const Trace& trace) const {
  if (!model_->Has("seq0.hidden")) return;  // the quantized models have none
  const std::vector<float> all = model_->Floats("seq0.hidden");
  const auto hidden = static_cast<size_t>(model_->spec().hidden);
  const size_t layers = model_->spec().layers.size() + 1;
  const size_t tokens = all.size() / layers / hidden;
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(layer * tokens * hidden);
    const std::vector<float> expected(begin, begin + static_cast<std::ptrdiff_t>(tokens * hidden));
    const float bound = 5e-5f * Largest(expected);
    float worst = 0;
    for (size_t t = 0; t < tokens; ++t) {
      const std::vector<float>& got = trace.hidden[layer].at(static_cast<uint32_t>(t));
      for (size_t i = 0; i < hidden; ++i) {
        worst = std::max(worst, std::fabs(got[i] - expected[t * hidden + i]));
      }
    }
    EXPECT_LE(worst, bound) << "after layer " << layer;
  }
}

void GoldenTest::ExpectPicks(const Trace& trace) const {
  const auto& layers = model_->runner().decoder().picks();
  const auto top_k = static_cast<size_t>(model_->spec().moe.top_k);
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string name = "seq0.router." + std::to_string(layers[i].layer) + ".indices";
    if (!model_->Has(name)) continue;
    const std::vector<uint32_t> expected = model_->Ids(name);
    for (size_t t = 0; t < expected.size() / top_k; ++t) {
      const auto& got = trace.picks[i].at(static_cast<uint32_t>(t));
      const std::set<uint32_t> got_set(got.begin(), got.end());
      const std::set<uint32_t> want_set(
          expected.begin() + static_cast<std::ptrdiff_t>(t * top_k),
          expected.begin() + static_cast<std::ptrdiff_t>((t + 1) * top_k));
      EXPECT_EQ(got_set, want_set) << name << " token " << t;
    }
  }
}

TEST_P(GoldenTest, WholePromptsGiveReferenceLogitsHiddenStatesPicksAndTokens) {
  ASSERT_NO_FATAL_FAILURE(Load({}));
  if (IsSkipped()) return;
  GoldenDriver driver(*model_);
  const auto tokens = driver.Generate({Feed(0, 1, 0)}, 0, kNewTokens);
  ExpectLogits(driver.trace(1), "seq0.logits", 0);
  ExpectHidden(driver.trace(1));
  ExpectPicks(driver.trace(1));
  EXPECT_EQ(tokens[0], model_->Ids("seq0.greedy.ids"));
  const auto tokens1 = driver.Generate({Feed(1, 2, 16)}, 0, kNewTokens);
  ExpectLogits(driver.trace(2), "seq1.logits", 0);
  EXPECT_EQ(tokens1[0], model_->Ids("seq1.greedy.ids"));
  const GoldenDriver::Feed long_feed = Feed(2, 3, 32);
  driver.Generate({long_feed}, 0, 1);
  ExpectLogits(driver.trace(3), "seq2.logits_tail",
               static_cast<uint32_t>(long_feed.prompt.size()) - 8);
}

// Bit-equal whatever the cutting and the company.
TEST_P(GoldenTest, ChunksAndBatchesGiveTheSameBits) {
  ASSERT_NO_FATAL_FAILURE(Load({}));
  if (IsSkipped()) return;
  GoldenDriver whole(*model_);
  const auto tokens = whole.Generate({Feed(0, 1, 0)}, 0, kNewTokens);
  whole.Generate({Feed(1, 2, 16)}, 0, kNewTokens);
  for (const uint32_t chunk : {5u, 1u}) {
    GoldenDriver chunked(*model_);
    EXPECT_EQ(chunked.Generate({Feed(0, 1, 3)}, chunk, kNewTokens), tokens);
    EXPECT_EQ(chunked.trace(1).logits, whole.trace(1).logits) << "chunks of " << chunk;
    EXPECT_EQ(chunked.trace(1).hidden, whole.trace(1).hidden) << "chunks of " << chunk;
  }
  for (const uint32_t chunk : {0u, 7u}) {
    GoldenDriver batched(*model_);
    batched.Generate({Feed(1, 2, 40), Feed(0, 1, 0)}, chunk, kNewTokens);
    EXPECT_EQ(batched.trace(1).logits, whole.trace(1).logits) << "batched, chunks of " << chunk;
    EXPECT_EQ(batched.trace(2).logits, whole.trace(2).logits) << "batched, chunks of " << chunk;
  }
}

TEST_P(GoldenMoeTest, SeveralExpertWorkersGiveTheReferenceToo) {
  for (const std::vector<uint32_t>& shares :
       {std::vector<uint32_t>{1, 1}, std::vector<uint32_t>{3, 0, 1}}) {
    ASSERT_NO_FATAL_FAILURE(Load({.shares = shares}));
    if (IsSkipped()) return;
    GoldenDriver driver(*model_);
    const auto tokens = driver.Generate({Feed(0, 1, 0)}, 0, kNewTokens);
    ExpectLogits(driver.trace(1), "seq0.logits", 0);
    ExpectHidden(driver.trace(1));
    ExpectPicks(driver.trace(1));
    EXPECT_EQ(tokens[0], model_->Ids("seq0.greedy.ids"));
    GoldenDriver chunked(*model_);
    chunked.Generate({Feed(1, 2, 40), Feed(0, 1, 0)}, 5, kNewTokens);
    EXPECT_EQ(chunked.trace(1).logits, driver.trace(1).logits) << shares.size() << " workers";
  }
}

// One thread and two give the same bits.
TEST_P(GoldenTest, ThreadsDoNotChangeBits) {
  Trace traces[2];
  for (const int threads : {1, 2}) {
    ASSERT_NO_FATAL_FAILURE(Load({.threads = threads}));
    if (IsSkipped()) return;
    GoldenDriver driver(*model_);
    driver.Generate({Feed(0, 1, 0)}, 0, kNewTokens);
    traces[threads - 1] = driver.trace(1);
  }
  EXPECT_EQ(traces[0].logits, traces[1].logits);
}

// The default mode rounds rows on the link and cached keys to BF16. Measured bound on the median
// row (golden/README.md: rows whose experts flip go beyond any bound on the worst).
TEST_P(GoldenTest, DefaultModeStaysNearTheReference) {
  ASSERT_NO_FATAL_FAILURE(Load({.parity = false}));
  if (IsSkipped()) return;
  GoldenDriver driver(*model_);
  driver.Generate({Feed(0, 1, 0)}, 0, 1);
  const std::vector<float> expected = model_->Floats("seq0.logits");
  const auto vocab = static_cast<size_t>(model_->spec().vocab);
  std::vector<float> errors;
  for (const auto& [position, row] : driver.trace(1).logits) {
    float worst = 0;
    for (size_t i = 0; i < vocab; ++i) {
      worst = std::max(worst, std::fabs(row[i] - expected[position * vocab + i]));
    }
    errors.push_back(worst / Largest(expected));
  }
  std::sort(errors.begin(), errors.end());
  RecordProperty("median_row", std::to_string(errors[errors.size() / 2]));
  RecordProperty("worst_row", std::to_string(errors.back()));
  EXPECT_LE(errors[errors.size() / 2], 0.02f);
}

const auto kName = [](const auto& info) { return info.param; };

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest,
                         ::testing::Values("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe",
                                           "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k2_int4",
                                           "qwen3_moe_fp8"),
                         kName);
INSTANTIATE_TEST_SUITE_P(Models, GoldenMoeTest,
                         ::testing::Values("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3",
                                           "kimi_k2", "kimi_k2_int4", "qwen3_moe_fp8"),
                         kName);

}  // namespace
}  // namespace tandem::gpu
