// What the pipeline's policies do to results: Expert Deferral is the rule of the reference figures,
// ping-pong lanes change no bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/checkpoint/safetensors.h"
#include "tests/gpu_worker/step_test_util.h"
#include "tests/testing/shared_data.h"

namespace tandem::gpu {
namespace {

using Mode = PlannerOptions::Mode;

struct DeferralCase {
  std::string name;
  int max_deferred;
  float max_mass;
};

class DeferralGoldenTest : public ::testing::TestWithParam<DeferralCase> {};

std::vector<float> Tensor(const SafetensorsFile& file, const std::string& name) {
  for (const SafetensorsEntry& entry : file.entries()) {
    if (entry.name != name) continue;
    std::vector<float> out((entry.end - entry.begin) / sizeof(float));
    std::memcpy(out.data(), file.View(entry).data, entry.end - entry.begin);
    return out;
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

std::vector<uint32_t> TokenIds(const SafetensorsFile& file, size_t sequence, size_t tokens) {
  for (const SafetensorsEntry& entry : file.entries()) {
    if (entry.name != "ids") continue;
    std::vector<uint32_t> all((entry.end - entry.begin) / sizeof(uint32_t));
    std::memcpy(all.data(), file.View(entry).data, entry.end - entry.begin);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(sequence * tokens);
    return {begin, begin + static_cast<std::ptrdiff_t>(tokens)};
  }
  ADD_FAILURE() << "no ids";
  return {};
}

// The largest difference of the logits of the reference's two prompts, beside the largest of them.
float WorstLogit(GoldenModel& model, const SafetensorsFile& file, const std::string& setting) {
  constexpr size_t kTokens = 96;
  const std::vector<float> want = Tensor(file, "logits." + setting);
  const auto vocab = static_cast<size_t>(model.spec().vocab);
  GoldenDriver driver(model);
  driver.Generate({{.id = 1, .prompt = TokenIds(file, 0, kTokens), .first_block = 0},
                   {.id = 2, .prompt = TokenIds(file, 1, kTokens), .first_block = 8}},
                  0, 0);
  float worst = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const size_t sequence = i / (kTokens * vocab);
    const auto position = static_cast<uint32_t>(i / vocab % kTokens);
    const float got = driver.trace(sequence + 1).logits.at(position)[i % vocab];
    worst = std::max(worst, std::fabs(got - want[i]));
    largest = std::max(largest, std::fabs(want[i]));
  }
  return worst / largest;
}

// The reference defers in every row of the prompt.
GoldenOptions DeferringOptions(Mode mode, int max_deferred, float max_mass) {
  GoldenOptions options;
  options.pipeline.mode = mode;
  options.pipeline.deferral = {max_deferred, max_mass};
  options.pipeline.defer_prefill = true;
  return options;
}

absl::StatusOr<std::unique_ptr<GoldenModel>> ShippedModel(const GoldenOptions& options) {
  return GoldenModel::Load((tandem::testing::SourceRoot() / "deploy/models/tandem-tiny").string(),
                           options);
}

TEST_P(DeferralGoldenTest, LogitsAreThoseOfTheReference) {
  const auto path = tandem::testing::SharedPath("golden/deferral.safetensors");
  if (!path) GTEST_SKIP() << "no golden/deferral.safetensors";
  auto file = SafetensorsFile::Open(path->string());
  ASSERT_TRUE(file.ok()) << file.status();
  const DeferralCase& setting = GetParam();
  for (const Mode mode : {Mode::kDeferral, Mode::kBoth}) {
    auto model = ShippedModel(DeferringOptions(mode, setting.max_deferred, setting.max_mass));
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_LE(WorstLogit(**model, **file, setting.name), 1e-4f) << setting.name;
    const PipelineCounters& counters = (*model)->runner().pipeline().counters();
    EXPECT_EQ(counters.deferred_picks > 0, setting.max_deferred > 0);
    EXPECT_LE(counters.deferred_mass,
              double{setting.max_mass} * static_cast<double>(counters.routed_rows));
  }
}
INSTANTIATE_TEST_SUITE_P(Settings, DeferralGoldenTest,
                         ::testing::Values(DeferralCase{"plain", 0, 1}, DeferralCase{"d1", 1, 1},
                                           DeferralCase{"d2", 2, 1},
                                           DeferralCase{"d2_mass15", 2, 0.15f}),
                         [](const auto& info) { return info.param.name; });

// Experts 0 3 7 8 21 of every layer lie on the device: they are not deferred, and their weight
// counts. Traffic of them alone makes just them resident.
TEST(DeferralGolden, ResidentExpertsAreNotDeferred) {
  const auto path = tandem::testing::SharedPath("golden/deferral.safetensors");
  if (!path) GTEST_SKIP() << "no golden/deferral.safetensors";
  auto file = SafetensorsFile::Open(path->string());
  ASSERT_TRUE(file.ok()) << file.status();
  const std::vector<uint16_t> residents{0, 3, 7, 8, 21};
  GoldenOptions options = DeferringOptions(Mode::kDeferral, 3, 0.4f);
  options.hot_experts_bytes = uint64_t{1} << 30;
  const auto model = ShippedModel(options);
  ASSERT_TRUE(model.ok()) << model.status();
  const size_t layers = (*model)->runner().decoder().picks().size();
  HotExperts& hot = *(*model)->hot_experts();
  for (int step = 0; step < 200; ++step) {
    hot.BeginStep();
    for (size_t layer = 0; layer < layers; ++layer) hot.Count(static_cast<int>(layer), residents);
    hot.EndStep();
    hot.WaitForCopies();
  }
  hot.BeginStep();
  ASSERT_EQ(hot.counters().resident_experts, layers * residents.size());
  EXPECT_LE(WorstLogit(**model, **file, "d3_mass40_resident"), 1e-4f);
  EXPECT_GT((*model)->runner().pipeline().counters().resident_picks, 0u);
}

class PingPongTest : public StepRunnerTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  // Three sequences of uneven lengths, prompts in chunks beside decodes of those that are done.
  std::vector<Trace> Traces(const PipelineOptions& pipeline, uint32_t chunk) {
    GoldenOptions options;
    options.pipeline = pipeline;
    Load(GetParam(), options);
    if (IsSkipped() || HasFatalFailure()) return {};
    GoldenDriver driver(*model_);
    std::vector<GoldenDriver::Feed> feeds;
    const std::vector<uint32_t> ids = model_->Ids("seq0.ids");
    for (uint64_t id = 1; id <= 3; ++id) {
      const size_t length = std::max<size_t>(ids.size() / id, 2);
      feeds.push_back({.id = id,
                       .prompt = {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(length)},
                       .first_block = static_cast<int>(16 * (id - 1))});
    }
    tokens_ = driver.Generate(feeds, chunk, 6);
    lanes_ = model_->runner().pipeline().counters().steps;
    return {driver.trace(1), driver.trace(2), driver.trace(3)};
  }

  std::vector<std::vector<uint32_t>> tokens_;
  std::array<uint64_t, kPolicies> lanes_{};
};

void ExpectSameBits(const std::vector<Trace>& a, const std::vector<Trace>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].logits, b[i].logits) << "sequence " << i;
    EXPECT_EQ(a[i].hidden, b[i].hidden) << "sequence " << i;
    EXPECT_EQ(a[i].picks, b[i].picks) << "sequence " << i;
  }
}

TEST_P(PingPongTest, HasTheBitsOfPlain) {
  for (const uint32_t chunk : {0u, 5u}) {
    const auto plain = Traces({.mode = Mode::kPlain}, chunk);
    if (IsSkipped()) return;
    const auto tokens = tokens_;
    EXPECT_EQ(lanes_[static_cast<size_t>(StepPolicy::kPingPong)], 0u);
    const auto lanes = Traces({.mode = Mode::kPingPong}, chunk);
    EXPECT_GT(lanes_[static_cast<size_t>(StepPolicy::kPingPong)], 4u);
    EXPECT_EQ(tokens, tokens_);
    ExpectSameBits(plain, lanes);
  }
}

TEST_P(PingPongTest, WithDeferralHasTheBitsOfDeferral) {
  const DeferralLimits limits{.max_deferred = 2, .max_mass = 0.6f};
  const auto deferral = Traces({.mode = Mode::kDeferral, .deferral = limits}, 5);
  if (IsSkipped()) return;
  EXPECT_GT(model_->runner().pipeline().counters().deferred_picks, 0u);
  const auto both = Traces({.mode = Mode::kBoth, .deferral = limits}, 5);
  EXPECT_GT(lanes_[static_cast<size_t>(StepPolicy::kBoth)], 4u);
  ExpectSameBits(deferral, both);
}

// Prompt rows keep all experts in time, unless asked; and nothing deferred is as no deferral.
TEST_P(PingPongTest, PromptsAreNotDeferred) {
  std::vector<Trace> traces;
  for (const int max_deferred : {0, 2}) {
    GoldenOptions options;
    options.pipeline = {.mode = Mode::kDeferral,
                        .deferral = {.max_deferred = max_deferred, .max_mass = 1}};
    Load(GetParam(), options);
    if (IsSkipped()) return;
    GoldenDriver driver(*model_);
    driver.Generate({{.id = 1, .prompt = model_->Ids("seq0.ids"), .first_block = 0}}, 0, 0);
    EXPECT_EQ(model_->runner().pipeline().counters().deferred_picks, 0u);
    traces.push_back(driver.trace(1));
  }
  EXPECT_EQ(traces[0].logits, traces[1].logits);
}

// A lane's power-of-two bound must not pass what the link and the ops were made for.
TEST_P(PingPongTest, FillsAStepWhoseSizeIsNoPowerOfTwo) {
  GoldenOptions options;
  options.pipeline.mode = Mode::kPingPong;
  options.max_step_rows = options.max_sequences = 11;
  options.max_context = 16;
  Load(GetParam(), options);
  if (IsSkipped()) return;
  v1::Step first;
  v1::Step second;
  for (uint32_t i = 0; i < 11; ++i) {
    AddStart(first, i);
    AddTokens(first, i, 0, {2 + i}, {i}, true);
    AddDecode(second, i, 1);
  }
  EXPECT_EQ(Run(first).outcome(), v1::STEP_OUTCOME_OK);
  for (int step = 0; step < 4; ++step) {
    const v1::StepResult result = Run(second);
    ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
    EXPECT_EQ(result.sequences_size(), 11);
    for (auto& sequence : *second.mutable_sequences()) {
      sequence.set_start_position(sequence.start_position() + 1);
    }
  }
}

// A second sequence reads blocks that a first one has written, from its own lane.
TEST_P(PingPongTest, WorksWithSharedPrefixBlocks) {
  std::vector<std::string> results;
  for (const Mode mode : {Mode::kPlain, Mode::kPingPong}) {
    GoldenOptions options;
    options.pipeline.mode = mode;
    Load(GetParam(), options);
    if (IsSkipped()) return;
    std::vector<uint32_t> prefix;
    for (uint32_t i = 0; i < 32; ++i) prefix.push_back(2 + i % 11);
    v1::Step first;
    AddStart(first, 1).mutable_sampling()->set_top_logprobs(5);
    AddTokens(first, 1, 0, prefix, {0, 1}, true);
    EXPECT_EQ(Run(first).outcome(), v1::STEP_OUTCOME_OK);
    v1::Step both;
    AddDecode(both, 1, 32, {2});
    v1::SequenceStart& start = AddStart(both, 2);
    start.mutable_sampling()->set_top_logprobs(5);
    start.set_prompt_logprobs(3);
    AddTokens(both, 2, 32, {5, 6, 7, 8}, {0, 1, 3}, true);
    v1::StepResult result = Run(both);
    ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
    std::string text;
    for (const auto& sequence : result.sequences()) text += sequence.SerializeAsString();
    results.push_back(text);
  }
  EXPECT_EQ(results[0], results[1]);
}

INSTANTIATE_TEST_SUITE_P(Models, PingPongTest,
                         ::testing::Values("mixtral", "qwen3_moe", "deepseek_v3"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tandem::gpu
