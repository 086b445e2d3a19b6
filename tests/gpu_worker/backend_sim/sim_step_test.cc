// Whole steps of the shipped model on a simulated machine: the same numbers as on the CPU backend,
// the same times from equal work, and a plain step's time against a scalar model of one device and
// one team of experts.

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/gpu_worker/backend_sim/simulated_model.h"
#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

std::string ShippedModel() {
  return (tandem::testing::SourceRoot() / "deploy/models/tandem-tiny").string();
}

// The shipped model's graph at the widths of a large one.
SimShape WideShape() {
  const auto small = SpecOf(ShippedModel());
  EXPECT_TRUE(small.ok()) << small.status();
  ModelSpec big = *small;
  big.hidden = 4096;
  big.vocab = 150'000;
  big.attention.heads = 32;
  big.attention.kv_heads = 8;
  big.attention.head_dim = 128;
  big.rope.rotary_dims = 128;
  big.moe.intermediate = 1536;
  const auto shape = MakeSimShape(*small, big, {.experts = 0.5625});
  EXPECT_TRUE(shape.ok()) << shape.status();
  return *shape;
}

SimulatedOptions Options(SimMode mode, bool parity) {
  SimulatedOptions options{.machine = *FindSimMachine("rtx4090-2s"), .shape = WideShape()};
  options.timeline.mode = mode;
  options.golden.parity = parity;
  return options;
}

const std::vector<GoldenDriver::Feed> kFeeds = {
    {.id = 1, .prompt = {5, 17, 300, 42, 7, 7, 900, 12, 1, 80, 33, 6, 2, 9, 511, 40, 3}},
    {.id = 2, .prompt = {700, 31, 8}, .first_block = 8}};
constexpr uint32_t kChunk = 6;
constexpr uint32_t kNewTokens = 5;

class SimStepTest : public ::testing::TestWithParam<SimMode> {};

TEST_P(SimStepTest, ComputesTheSameBitsAsTheCpuBackend) {
  for (const bool parity : {true, false}) {
    auto cpu = GoldenModel::Load(ShippedModel(), {.parity = parity, .threads = 1});
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    GoldenDriver expected(**cpu);
    const auto tokens = expected.Generate(kFeeds, kChunk, kNewTokens);
    auto sim = SimulatedModel::Load(ShippedModel(), Options(GetParam(), parity));
    ASSERT_TRUE(sim.ok()) << sim.status();
    GoldenDriver actual((*sim)->model());
    EXPECT_EQ(actual.Generate(kFeeds, kChunk, kNewTokens), tokens);
    for (const GoldenDriver::Feed& feed : kFeeds) {
      EXPECT_EQ(actual.trace(feed.id).logits, expected.trace(feed.id).logits);
      EXPECT_EQ(actual.trace(feed.id).picks, expected.trace(feed.id).picks);
    }
    EXPECT_GT((*sim)->device().timeline.BusyNs(SimResource::kExperts), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, SimStepTest, ::testing::Values(SimMode::kVirtual, SimMode::kWall),
                         [](const auto& info) {
                           return info.param == SimMode::kVirtual ? "Virtual" : "Wall";
                         });

// Times of the host after each of some steps: a prompt, then decodes of 1 and 3 sequences.
class Steps {
 public:
  explicit Steps(SimulatedModel& sim) : sim_(sim) {}

  void Prompt(uint64_t id, const std::vector<uint32_t>& tokens) {
    v1::Step step;
    AddStart(step, id);
    AddTokens(step, id, 0, tokens,
              {static_cast<uint32_t>(id) * 2, static_cast<uint32_t>(id) * 2 + 1}, true);
    Run(step);
  }
  void Decode(const std::vector<std::pair<uint64_t, uint32_t>>& rows) {
    v1::Step step;
    for (const auto& [id, position] : rows) AddDecode(step, id, position);
    Run(step);
  }
  const std::vector<int64_t>& times() const { return times_; }

 private:
  void Run(const v1::Step& step) {
    v1::StepResult result;
    sim_.model().runner().Run(step, result);
    ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
    times_.push_back(sim_.device().timeline.NowNs());
  }

  SimulatedModel& sim_;
  std::vector<int64_t> times_;
};

void SomeSteps(Steps& steps) {
  steps.Prompt(1, {5, 6, 7, 8, 9});
  steps.Decode({{1, 5}});
  steps.Prompt(2, {700, 31, 8});
  steps.Prompt(3, {4});
  steps.Decode({{1, 6}, {2, 3}, {3, 1}});
}

TEST(SimStep, EqualWorkTakesEqualVirtualTime) {
  std::vector<std::vector<int64_t>> times;
  for (int run = 0; run < 2; ++run) {
    auto sim = SimulatedModel::Load(ShippedModel(), Options(SimMode::kVirtual, true));
    ASSERT_TRUE(sim.ok()) << sim.status();
    Steps steps(**sim);
    SomeSteps(steps);
    times.push_back(steps.times());
  }
  EXPECT_EQ(times[0], times[1]);
}

// What the records say when one stream and one team work them off in order.
int64_t ReplayNs(const SimLog::Records& records, int64_t begin_ns, int64_t latency_ns) {
  int64_t stream_ns = begin_ns;
  int64_t team_ns = 0;
  int64_t answer_ns = 0;
  auto expert = records.experts.begin();
  for (const SimOpRecord& op : records.ops) {
    if (op.kind == SimOpRecord::Kind::kWait) {
      stream_ns = std::max(stream_ns, answer_ns + latency_ns);
    }
    stream_ns += op.duration_ns;
    if (op.kind == SimOpRecord::Kind::kSubmit) {
      answer_ns = std::max(stream_ns + latency_ns, team_ns) + expert->immediate_ns;
      team_ns = answer_ns + expert->deferred_ns;
      ++expert;
    }
  }
  EXPECT_EQ(expert, records.experts.end());
  return stream_ns;
}

TEST(SimStep, PlainStepTakesWhatAScalarModelSays) {
  auto sim = SimulatedModel::Load(ShippedModel(), Options(SimMode::kVirtual, true));
  ASSERT_TRUE(sim.ok()) << sim.status();
  SimDevice& device = (*sim)->device();
  Steps steps(**sim);
  SomeSteps(steps);
  device.log.Take();
  const int64_t begin_ns = device.timeline.NowNs();
  steps.Decode({{1, 7}, {2, 4}, {3, 2}});
  const SimLog::Records records = device.log.Take();
  EXPECT_EQ(ReplayNs(records, begin_ns, device.LatencyNs()), steps.times().back());

  // Experts: of the rows' picks, at the machine's bandwidth (three rows are far from its peak).
  const auto& layers = (*sim)->model().runner().decoder().picks();
  ASSERT_EQ(records.experts.size(), layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::set<uint16_t> distinct(layers[i].ids, layers[i].ids + 3 * 4);
    const double bytes = 3.0 * 4096 * 1536 * 0.5625 * static_cast<double>(distinct.size());
    EXPECT_EQ(records.experts[i].immediate_ns, 2000 + std::llround(bytes / 440)) << i;
    EXPECT_EQ(records.experts[i].deferred_ns, 0);
  }
  // Device: its weights once, and little else, the gaps between ops apart.
  int64_t busy_ns = 0;
  for (const SimOpRecord& op : records.ops) {
    if (op.rows != nullptr && op.kind == SimOpRecord::Kind::kOp) busy_ns += op.duration_ns - 500;
  }
  const double attention = 4096.0 * (2 * 32 + 2 * 8) * 128 + 4096 * 32;
  const double weights_ns = 2 * (6 * attention + 150'000.0 * 4096) / 1008;
  EXPECT_GT(static_cast<double>(busy_ns), weights_ns);
  EXPECT_LT(static_cast<double>(busy_ns), 1.05 * weights_ns);
}

TEST(SimStep, LongerContextsTakeLonger) {
  std::vector<int64_t> took_ns;
  for (const int offset : {0, 4096}) {
    SimulatedOptions options = Options(SimMode::kVirtual, true);
    options.shape.context_offset = offset;
    auto sim = SimulatedModel::Load(ShippedModel(), options);
    ASSERT_TRUE(sim.ok()) << sim.status();
    Steps steps(**sim);
    SomeSteps(steps);
    took_ns.push_back(steps.times()[1] - steps.times()[0]);
  }
  // Keys and values of 4,096 more tokens in each of 6 layers, but for six roundings.
  EXPECT_NEAR(static_cast<double>(took_ns[1] - took_ns[0]), 6 * 4096 * 2 * 8 * 128 * 2 / 1008.0, 6);
}

}  // namespace
}  // namespace tandem::gpu
