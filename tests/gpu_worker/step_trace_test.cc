// A step's stamps as events: every corner once, in its place, whatever the device's clock is. What
// a real step stamps is in the integration test and below, with the experts in process.

#include "gpu_worker/step_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/gpu_worker/step_test_util.h"

namespace tandem::gpu {
namespace {

using ::testing::ElementsAre;

// Was at layer l of lane n from 1000 * l + 100 * n on, after `origin_ns`.
class FakeLink final : public ExpertLink {
 public:
  explicit FakeLink(int64_t origin_ns) : origin_ns_(origin_ns) {}
  const shm::BatchLimits& limits() const override { return limits_; }
  int threads() const override { return 1; }
  void BeginStep(uint64_t) override {}
  void Submit(const Submission&, int, int) override {}
  void Wait(const Collection&, int, int) override {}
  absl::Status EndStep() override { return absl::OkStatus(); }
  LinkError error() const override { return LinkError::kNone; }
  bool broken() const override { return false; }
  bool overlaps() const override { return true; }
  LayerTimes layer_times(uint32_t lane, uint32_t layer) const override {
    const int64_t begin_ns = origin_ns_ + 1000 * layer + 100 * lane + 60;
    return {.begin_ns = begin_ns, .reply_ns = begin_ns + 10, .end_ns = begin_ns + 20};
  }

 private:
  const int64_t origin_ns_;
  const shm::BatchLimits limits_;
};

std::map<std::string, std::vector<TraceEvent>> ByTrack(const TraceLog& log) {
  std::map<std::string, std::vector<TraceEvent>> tracks;
  for (const TraceLog::Track& track : log.tracks) tracks[track.name] = track.events;
  return tracks;
}

std::vector<std::string> Names(const std::vector<TraceEvent>& events) {
  std::vector<std::string> names;
  for (const TraceEvent& event : events) names.push_back(event.kind->name);
  return names;
}

// Two lanes, MoE layers 3 and 4 of the link, stamps every few ns after `origin_ns`.
class StepTraceTest : public ::testing::Test {
 protected:
  std::map<std::string, std::vector<TraceEvent>> Traced(int64_t origin_ns, bool sampled = true) {
    trace_.set_layers({3, 4});
    EXPECT_TRUE(tracer_.Start().ok());
    EXPECT_TRUE(trace_.Begin());
    for (int lane = 0; lane < 2; ++lane) {
      for (int i = 0; i < 2; ++i) {
        const int64_t at = origin_ns + 1000 * (3 + i) + 100 * lane;
        // The wait of a lane comes after the other lane's part.
        layers_[2 * lane + i] = {.begin = at,
                                 .attended = at + 20,
                                 .submit = at + 30,
                                 .submitted = at + 40,
                                 .shared = at + 50,
                                 .wait = at + 200,
                                 .done = at + 210};
      }
    }
    const TracedStep step{.step = 9,
                          .gateway_step = 77,
                          .rows = 16,
                          .lanes = 2,
                          .logprobs = true,
                          .device = {.begin = origin_ns + 1,
                                     .layers = origin_ns + 5000,
                                     .head = sampled ? origin_ns + 5500 : 0,
                                     .sampled = sampled ? origin_ns + 5900 : 0,
                                     .end = origin_ns + 6000},
                          .layers = layers_};
    trace_.Mark(&HostStamps::prepared_ns);
    trace_.Mark(&HostStamps::enqueued_ns);
    trace_.Mark(&HostStamps::synchronized_ns);
    const FakeLink link(origin_ns);
    trace_.End(step, &link);
    return ByTrack(tracer_.Stop());
  }

  Tracer tracer_;
  StepTrace trace_{&tracer_};
  LayerStamps layers_[4];
};

TEST_F(StepTraceTest, IsNotTracedWhenOff) {
  StepTrace never(nullptr);
  EXPECT_FALSE(never.Begin());
  EXPECT_FALSE(trace_.Begin());
  EXPECT_FALSE(trace_.tracing());
}

TEST_F(StepTraceTest, ShowsEveryLayerOfEveryLaneOnTheDeviceAndTheLink) {
  const int64_t origin_ns = TraceNowNs() + 1'000'000;  // of our clock, after Start
  const auto tracks = Traced(origin_ns);
  const std::vector<TraceEvent>& device = tracks.at("device");
  EXPECT_THAT(Names(device),
              ElementsAre("embed, dense layers",                                      //
                          "attention", "router", "submit", "shared experts", "wait",  //
                          "attention", "router", "submit", "shared experts", "wait",  //
                          "attention", "router", "submit", "shared experts", "wait",  //
                          "attention", "router", "submit", "shared experts", "wait",  //
                          "head", "sampling", "log-probabilities"));
  const TraceEvent& router = device[2 + 5];  // of lane 1 at layer 3
  EXPECT_EQ(router.args, (TraceArgs{9, 3, 1}));
  EXPECT_EQ(router.begin_ns, origin_ns + 3120);
  EXPECT_EQ(router.end_ns, origin_ns + 3130);
  const std::vector<TraceEvent>& link = tracks.at("expert link, lane 1");
  EXPECT_THAT(Names(link), ElementsAre("rows to experts", "experts", "sums back", "rows to experts",
                                       "experts", "sums back"));
  EXPECT_EQ(link[0].begin_ns, origin_ns + 3130);
  EXPECT_EQ(link[0].end_ns, origin_ns + 3160);
  EXPECT_EQ(link[1].end_ns, origin_ns + 3170);
  EXPECT_EQ(link[2].end_ns, origin_ns + 3310);
  EXPECT_EQ(link[2].args, (TraceArgs{9, 3, 1}));
}

TEST_F(StepTraceTest, HostPartsFillTheStep) {
  const std::vector<TraceEvent> executor = Traced(TraceNowNs()).at("executor");
  const TraceEvent& step = executor.back();
  EXPECT_STREQ(step.kind->name, "step");
  EXPECT_EQ(step.args, (TraceArgs{9, 77, 16, 2}));
  int64_t at_ns = step.begin_ns;
  for (size_t i = 0; i + 1 < executor.size(); ++i) {
    EXPECT_EQ(executor[i].begin_ns, at_ns);
    at_ns = executor[i].end_ns;
  }
  EXPECT_EQ(at_ns, step.end_ns);
}

TEST_F(StepTraceTest, ADeviceWithAClockOfItsOwnEndsWhereTheHostHasSynchronized) {
  const auto tracks = Traced(500);
  const TraceEvent& last = tracks.at("device").back();
  const TraceEvent& step = tracks.at("executor").back();
  EXPECT_GE(last.end_ns, step.begin_ns);
  EXPECT_LE(last.end_ns, step.end_ns);
  EXPECT_EQ(last.end_ns - last.begin_ns, 100);
}

TEST_F(StepTraceTest, WhatWasNotSampledIsNotShown) {
  const auto tracks = Traced(TraceNowNs() + 1'000'000, /*sampled=*/false);
  for (const std::string& name : Names(tracks.at("device"))) {
    EXPECT_NE(name, "head");
    EXPECT_NE(name, "sampling");
  }
}

class TracedRunnerTest : public StepRunnerTestBase {};

TEST_F(TracedRunnerTest, StepsAreTracedOnlyWhileARecordingRuns) {
  Tracer tracer;
  GoldenOptions options;
  options.tracer = &tracer;
  Load("qwen3_moe", options);
  if (IsSkipped()) return;
  const size_t moe_layers = model_->runner().decoder().picks().size();
  v1::Step prompt;
  prompt.set_step_id(5);
  AddStart(prompt, 1);
  AddTokens(prompt, 1, 0, {2, 3, 4}, {0}, true);
  ASSERT_EQ(Run(prompt).outcome(), v1::STEP_OUTCOME_OK);
  ASSERT_TRUE(tracer.Start().ok());
  v1::Step decode;
  decode.set_step_id(6);
  AddDecode(decode, 1, 3);
  ASSERT_EQ(Run(decode).outcome(), v1::STEP_OUTCOME_OK);
  const auto tracks = ByTrack(tracer.Stop());
  const TraceEvent& step = tracks.at("executor").back();
  EXPECT_EQ(step.args.b, 6);
  EXPECT_EQ(step.args.c, 1);
  std::map<std::string, size_t> counts;
  int64_t last_ns = step.begin_ns;
  for (const TraceEvent& event : tracks.at("device")) {
    ++counts[event.kind->name];
    EXPECT_EQ(event.args.a, step.args.a);
    EXPECT_GE(event.begin_ns, last_ns) << event.kind->name;
    last_ns = event.end_ns;
  }
  EXPECT_LE(last_ns, step.end_ns);
  for (const char* name : {"attention", "router", "submit", "wait"}) {
    EXPECT_EQ(counts[name], moe_layers) << name;
  }
  for (const char* name : {"embed, dense layers", "head", "sampling"}) {
    EXPECT_EQ(counts[name], 1u) << name;
  }
}

TEST_F(TracedRunnerTest, CopiesOfHotExpertsAreOnATrackOfTheirOwn) {
  Tracer tracer;
  GoldenOptions options;
  options.tracer = &tracer;
  options.hot_experts_bytes = uint64_t{1} << 30;
  options.hot_policy.min_steps = 2;
  Load("qwen3_moe", options);
  if (IsSkipped()) return;
  ASSERT_TRUE(tracer.Start().ok());
  v1::Step step;
  AddStart(step, 1);
  AddTokens(step, 1, 0, {2, 3, 4}, {0}, true);
  ASSERT_EQ(Run(step).outcome(), v1::STEP_OUTCOME_OK);
  for (uint32_t position = 3; position < 8; ++position) {
    step.Clear();
    AddDecode(step, 1, position);
    ASSERT_EQ(Run(step).outcome(), v1::STEP_OUTCOME_OK);
    model_->hot_experts()->WaitForCopies();
  }
  model_->hot_experts()->BeginStep();
  const auto tracks = ByTrack(tracer.Stop());
  const HotExperts::Counters counters = model_->hot_experts()->counters();
  const std::vector<TraceEvent>& copies = tracks.at("hot experts");
  ASSERT_GT(counters.migrations, 0u);
  ASSERT_EQ(copies.size(), counters.migrations);
  std::set<std::pair<int64_t, int64_t>> experts;
  for (const TraceEvent& copy : copies) {
    EXPECT_STREQ(copy.kind->name, "copy expert");
    experts.emplace(copy.args.a, copy.args.b);
    EXPECT_EQ(copy.args.c, static_cast<int64_t>(counters.capacity_bytes / counters.slots));
    EXPECT_GT(copy.end_ns, copy.begin_ns);
  }
  EXPECT_EQ(experts.size(), copies.size());
  EXPECT_TRUE(tracks.at("streamed experts").empty());
}

TEST_F(TracedRunnerTest, StreamedLayersAndTheWaitForThemAreShown) {
  Tracer tracer;
  GoldenOptions options;
  options.tracer = &tracer;
  options.hot_experts_bytes = uint64_t{1} << 30;
  options.hot_policy.min_steps = UINT64_MAX;
  options.stream_prompts = true;
  options.fixed_streamed = 3;
  Load("qwen3_moe", options);
  if (IsSkipped()) return;
  std::vector<uint32_t> prompt(48, 7);
  v1::Step step;
  AddStart(step, 1);
  AddTokens(step, 1, 0, prompt, {0, 1, 2}, true);
  ASSERT_TRUE(tracer.Start().ok());
  ASSERT_EQ(Run(step).outcome(), v1::STEP_OUTCOME_OK);
  const auto tracks = ByTrack(tracer.Stop());
  const HotExperts::Counters counters = model_->hot_experts()->counters();
  const auto& layers = model_->runner().decoder().picks();
  const TraceEvent& traced = tracks.at("executor").back();
  const std::vector<TraceEvent>& copies = tracks.at("streamed experts");
  ASSERT_EQ(copies.size(), layers.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    EXPECT_EQ(copies[i].args.a, traced.args.a);
    EXPECT_EQ(copies[i].args.b, layers[i].layer);
    EXPECT_EQ(copies[i].args.c, 3);
    EXPECT_EQ(copies[i].args.d, static_cast<int64_t>(3 * counters.capacity_bytes / counters.slots));
    EXPECT_GE(copies[i].begin_ns, traced.begin_ns);
    EXPECT_LE(copies[i].end_ns, traced.end_ns);
  }
  const std::vector<std::string> device = Names(tracks.at("device"));
  EXPECT_EQ(std::count(device.begin(), device.end(), "wait for copies"),
            static_cast<ptrdiff_t>(layers.size()));
}

}  // namespace
}  // namespace tandem::gpu
