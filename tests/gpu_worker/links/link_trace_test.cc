// What an expert worker's threads record of the submissions that they serve, while they are being
// recorded and switched on and off.

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu_worker/links/link_harness.h"

namespace tandem::testing {
namespace {

constexpr int kThreads = 2;
constexpr uint32_t kLayers = 4;

class LinkTrace : public ::testing::TestWithParam<shm::Placement> {
 protected:
  void SetUp() override {
    const shm::BatchLimits limits = TestLimits();
    const auto ticket = worker_.Offer(limits);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    auto link = gpu::AttachShmExpertLink(LinkOptions(*ticket, limits, kThreads));
    ASSERT_TRUE(link.ok()) << link.status();
    link_ = *std::move(link);
  }

  void Step(uint64_t step, bool deferred) {
    int mismatches = 0;
    const StepSpec spec{
        .step = step, .layers = kLayers, .rows_of_lane = {3, 5}, .deferred = deferred};
    const absl::Status status = RunStep(link_.get(), spec, step, &mismatches);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(mismatches, 0);
  }

  // Events of one thread of step `step`, by name, in order.
  static std::vector<TraceEvent> Of(const TraceLog::Track& track, const std::string& name,
                                    int64_t step) {
    std::vector<TraceEvent> found;
    for (const TraceEvent& event : track.events) {
      if (event.kind->name == name && event.args.a == step) found.push_back(event);
    }
    return found;
  }

  static void ExpectNoOverlaps(const TraceLog::Track& track) {
    int64_t last_ns = 0;
    for (const TraceEvent& event : track.events) {
      EXPECT_GE(event.begin_ns, last_ns) << event.kind->name;
      EXPECT_GE(event.end_ns, event.begin_ns) << event.kind->name;
      last_ns = event.end_ns;
    }
  }

  Tracer tracer_;
  TempSocketDir dir_;
  ExpertWorkerThreads worker_{dir_.Socket("expert.link"), kThreads, GetParam(), 0, &tracer_};
  std::unique_ptr<gpu::ExpertLink> link_;
};

TEST_P(LinkTrace, EveryThreadShowsEveryBatchOfEveryLane) {
  ASSERT_TRUE(tracer_.Start().ok());
  Step(1, false);  // the threads' first laps mark where they begin
  Step(2, false);
  Step(3, true);
  Step(4, false);  // all of step 3 has been recorded
  const TraceLog log = tracer_.Stop();
  ASSERT_EQ(log.tracks.size(), static_cast<size_t>(kThreads));
  for (const TraceLog::Track& track : log.tracks) {
    ExpectNoOverlaps(track);
    for (const int64_t step : {2, 3}) {
      const std::vector<TraceEvent> batches = Of(track, "experts", step);
      ASSERT_EQ(batches.size(), 2 * kLayers) << track.name;
      for (uint32_t i = 0; i < batches.size(); ++i) {
        EXPECT_EQ(batches[i].kind->role, TraceRole::kCompute);
        EXPECT_EQ(batches[i].args, (TraceArgs{step, i / 2, i % 2, i % 2 == 0 ? 3 : 5}));
      }
      EXPECT_EQ(Of(track, "between steps", step).size(), 1u);
      EXPECT_EQ(Of(track, "bubble", step).size(), 2 * kLayers - 1);
      // The last layer defers nothing.
      EXPECT_EQ(Of(track, "deferred experts", step).size(), step == 3 ? 2 * (kLayers - 1) : 0);
    }
  }
}

TEST_P(LinkTrace, RecordingsComeAndGoWhileStepsRun) {
  std::atomic<bool> done{false};
  std::thread recorder([&] {
    while (!done.load()) {
      EXPECT_TRUE(tracer_.Start().ok());
      tracer_.Drain();
      for (const TraceLog::Track& track : tracer_.Stop().tracks) ExpectNoOverlaps(track);
    }
  });
  for (uint64_t step = 1; step <= 30; ++step) Step(step, step % 2 == 0);
  done.store(true);
  recorder.join();
}

INSTANTIATE_TEST_SUITE_P(Placements, LinkTrace,
                         ::testing::Values(shm::Placement::kApart, shm::Placement::kColocated),
                         [](const auto& info) {
                           return info.param == shm::Placement::kApart ? "Apart" : "Colocated";
                         });

}  // namespace
}  // namespace tandem::testing
