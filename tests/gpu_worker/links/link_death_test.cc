// Two real processes: either side killed or stopped at random points, and what the other makes of
// it.

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "tests/gpu_worker/links/link_harness.h"
#include "tests/gpu_worker/links/peer_process.h"

namespace tandem::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// TANDEM_SEED repeats a run.
uint64_t Seed() {
  const char* text = std::getenv("TANDEM_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 20261129;
  std::printf("seed %llu (set TANDEM_SEED to change)\n", static_cast<unsigned long long>(seed));
  return seed;
}

struct Load {
  absl::Status status;  // of the failed step
  int good_steps = 0;
  int mismatches = 0;
};

// Steps until one fails; `good_steps` counts along for other threads.
Load RunUntilFailure(gpu::ExpertLink* link, std::atomic<int>* good_steps = nullptr) {
  Load load;
  for (uint64_t step = 1; load.status.ok(); ++step) {
    load.status =
        RunStep(link, {.step = step, .layers = 8, .rows_of_lane = {9, 4}}, step, &load.mismatches);
    if (load.status.ok()) ++load.good_steps;
    if (good_steps != nullptr) good_steps->store(load.good_steps);
  }
  return load;
}

std::unique_ptr<gpu::ExpertLink> AttachTo(PeerProcess* worker, int threads) {
  const auto ticket = TicketFromText(worker->Ask("offer"));
  if (!ticket.has_value()) return nullptr;
  auto link = gpu::AttachShmExpertLink(LinkOptions(*ticket, TestLimits(), threads));
  EXPECT_TRUE(link.ok()) << link.status();
  return link.ok() ? std::move(link).value() : nullptr;
}

class LinkDeath : public ::testing::TestWithParam<const char*> {
 protected:
  int threads() const { return std::string(GetParam()) == "apart" ? 1 : 2; }
  std::string Socket() const { return dir_.Socket("expert0.link"); }
  std::vector<std::string> ExpertArguments() const {
    return {"expert", Socket(), std::to_string(threads()), GetParam()};
  }

  TempSocketDir dir_;
};

TEST_P(LinkDeath, KilledExpertWorkerFailsTheStepAtOnceAndLeavesNothing) {
  std::mt19937_64 random(Seed());
  const int descriptors = OpenDescriptors();
  for (int round = 0; round < 8; ++round) {
    PeerProcess worker(ExpertArguments());
    ASSERT_EQ(worker.ReadLine(), "ready");
    auto link = AttachTo(&worker, threads());
    ASSERT_NE(link, nullptr);
    steady_clock::time_point killed;
    std::thread killer([&, delay = random() % 20'000] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
      killed = steady_clock::now();
      worker.Signal(SIGKILL);
    });
    const Load load = RunUntilFailure(link.get());
    const auto failed = steady_clock::now();
    killer.join();
    EXPECT_EQ(load.status.code(), absl::StatusCode::kUnavailable) << load.status;
    EXPECT_TRUE(link->broken());
    EXPECT_EQ(load.mismatches, 0);
    EXPECT_LT(failed - killed, milliseconds(1000));
    std::printf("noticed after %.3f ms\n",
                std::chrono::duration<double, std::milli>(failed - killed).count());
    // A broken link answers at once.
    EXPECT_FALSE(
        RunStep(link.get(), {.step = 99, .layers = 2, .rows_of_lane = {1}}, 1, nullptr).ok());
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(MappingsNamed("memfd:tandem-link"), 0);
}

// Taken up, computed but not answered, answered with deferred picks to do; in the first and the
// second half of a ping-pong step; in the first, a middle and the last layer.
TEST_P(LinkDeath, KilledInEveryPhaseFailsTheStepAndNothingIsMixed) {
  using Phase = FakeExperts::Phase;
  for (const Phase phase : {Phase::kTakenUp, Phase::kComputed, Phase::kDeferred}) {
    for (const uint32_t lane : {0u, 1u}) {
      for (const uint32_t layer : {0u, 2u, 3u}) {
        if (phase == Phase::kDeferred && layer == 3) continue;  // the last layer defers nothing
        PeerProcess worker(ExpertArguments());
        ASSERT_EQ(worker.ReadLine(), "ready");
        auto link = AttachTo(&worker, threads());
        ASSERT_NE(link, nullptr);
        std::ostringstream order;
        order << "die " << static_cast<unsigned>(phase) << " 2 " << lane << " " << layer;
        ASSERT_EQ(worker.Ask(order.str()), "ok");
        int mismatches = 0;
        StepSpec spec{.step = 1, .layers = 4, .rows_of_lane = {3, 2}, .deferred = true};
        EXPECT_TRUE(RunStep(link.get(), spec, 1, &mismatches).ok());
        EXPECT_EQ(mismatches, 0);
        spec.step = 2;
        EXPECT_EQ(RunStep(link.get(), spec, 2, &mismatches).code(), absl::StatusCode::kUnavailable)
            << order.str();
        EXPECT_TRUE(link->broken());
        // Calls of a broken link return at once.
        spec.step = 3;
        EXPECT_FALSE(RunStep(link.get(), spec, 3, &mismatches).ok());
      }
    }
  }
}

TEST_P(LinkDeath, KilledExpertWorkerIsNoticedWhileIdle) {
  PeerProcess worker(ExpertArguments());
  ASSERT_EQ(worker.ReadLine(), "ready");
  auto link = AttachTo(&worker, threads());
  ASSERT_NE(link, nullptr);
  worker.Kill();
  EXPECT_TRUE(Eventually([&] { return link->broken(); }, 2));
  EXPECT_EQ(link->error(), gpu::LinkError::kPeerDied);
}

TEST_P(LinkDeath, StoppedExpertWorkerFailsTheStepWithinTwoSecondsAndIsUsableAfterwards) {
  PeerProcess worker(ExpertArguments());
  ASSERT_EQ(worker.ReadLine(), "ready");
  auto link = AttachTo(&worker, threads());
  ASSERT_NE(link, nullptr);
  steady_clock::time_point stopped;
  std::atomic<int> good_steps{0};
  std::thread stopper([&] {
    EXPECT_TRUE(Eventually([&] { return good_steps.load() > 0; }, 30));
    stopped = steady_clock::now();
    worker.Signal(SIGSTOP);
  });
  const Load load = RunUntilFailure(link.get(), &good_steps);
  const auto failed = steady_clock::now();
  stopper.join();
  EXPECT_EQ(load.status.code(), absl::StatusCode::kUnavailable) << load.status;
  EXPECT_EQ(link->error(), gpu::LinkError::kTimeout);
  EXPECT_GT(load.good_steps, 0);
  EXPECT_LT(failed - stopped, milliseconds(2000));

  worker.Signal(SIGCONT);
  link = AttachTo(&worker, threads());
  ASSERT_NE(link, nullptr);
  int mismatches = 0;
  EXPECT_TRUE(
      RunStep(link.get(), {.step = 1, .layers = 4, .rows_of_lane = {2, 3}}, 1, &mismatches).ok());
  EXPECT_EQ(mismatches, 0);
}

TEST_P(LinkDeath, HungHandlerShowsThoughTheProcessLives) {
  PeerProcess worker(ExpertArguments());
  ASSERT_EQ(worker.ReadLine(), "ready");
  auto link = AttachTo(&worker, threads());
  ASSERT_NE(link, nullptr);
  ASSERT_EQ(worker.Ask("hang"), "ok");
  const Load load = RunUntilFailure(link.get());
  EXPECT_EQ(link->error(), gpu::LinkError::kTimeout) << load.status;
  EXPECT_EQ(load.good_steps, 0);
}

TEST_P(LinkDeath, KilledGpuWorkerFreesItsSegmentAndTheNextAttaches) {
  std::mt19937_64 random(Seed());
  const auto placement =
      std::string(GetParam()) == "apart" ? shm::Placement::kApart : shm::Placement::kColocated;
  const int before = OpenDescriptors();
  {
    ExpertWorkerThreads worker(Socket(), threads(), placement);
    const int descriptors = OpenDescriptors();
    for (int round = 0; round < 8; ++round) {
      PeerProcess gpu_worker({"gpu", std::to_string(threads())});
      const auto ticket = worker.Offer(TestLimits());
      ASSERT_TRUE(ticket.ok());
      ASSERT_EQ(gpu_worker.Ask("attach " + TicketToText(*ticket)), "attached");
      ASSERT_EQ(gpu_worker.Ask("step"), "ok");
      ASSERT_EQ(gpu_worker.Ask("run"), "running");
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      const auto killed = steady_clock::now();
      gpu_worker.Kill();
      EXPECT_TRUE(Eventually([&] { return !worker.loop().state().attached; }));
      EXPECT_LT(steady_clock::now() - killed, milliseconds(1000));
      EXPECT_TRUE(Eventually([&] { return MappingsNamed("memfd:tandem-link") == 0; }));
    }
    EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors; }));
    EXPECT_EQ(worker.loop().state().attachments, 8u);
    EXPECT_EQ(worker.loop().state().refused_slots, 0u);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_P(LinkDeath, StoppedGpuWorkerYieldsToANewOne) {
  const auto placement =
      std::string(GetParam()) == "apart" ? shm::Placement::kApart : shm::Placement::kColocated;
  ExpertWorkerThreads worker(Socket(), threads(), placement);
  PeerProcess first({"gpu", std::to_string(threads())});
  PeerProcess second({"gpu", std::to_string(threads())});
  auto ticket = worker.Offer(TestLimits());
  ASSERT_TRUE(ticket.ok());
  ASSERT_EQ(first.Ask("attach " + TicketToText(*ticket)), "attached");
  ASSERT_EQ(first.Ask("run"), "running");
  std::this_thread::sleep_for(milliseconds(10));
  first.Signal(SIGSTOP);
  ticket = worker.Offer(TestLimits());
  ASSERT_TRUE(ticket.ok());
  ASSERT_EQ(second.Ask("attach " + TicketToText(*ticket)), "attached");
  EXPECT_EQ(second.Ask("step"), "ok");
  // The first finds its link ended, not silent.
  first.Signal(SIGCONT);
  EXPECT_EQ(first.ReadLine(), "failed");
  EXPECT_EQ(second.Ask("step"), "ok");
}

TEST_P(LinkDeath, AttachAgainstADyingWorkerIsAnErrorNotAHang) {
  std::mt19937_64 random(Seed());
  const int descriptors = OpenDescriptors();
  for (int round = 0; round < 12; ++round) {
    PeerProcess worker(ExpertArguments());
    ASSERT_EQ(worker.ReadLine(), "ready");
    const auto ticket = TicketFromText(worker.Ask("offer"));
    ASSERT_TRUE(ticket.has_value());
    std::thread killer([&, delay = random() % 1500] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
      worker.Signal(SIGKILL);
    });
    auto link = gpu::AttachShmExpertLink(LinkOptions(*ticket, TestLimits(), threads()));
    if (link.ok()) {
      EXPECT_FALSE(RunUntilFailure(link->get()).status.ok());
    }
    killer.join();
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(MappingsNamed("memfd:tandem-link"), 0);
}

TEST_P(LinkDeath, ClosedLinkLeavesNothingInTheWorker) {
  PeerProcess worker(ExpertArguments());
  ASSERT_EQ(worker.ReadLine(), "ready");
  std::string before;
  for (int round = 0; round < 5; ++round) {
    auto link = AttachTo(&worker, threads());
    ASSERT_NE(link, nullptr);
    int mismatches = 0;
    EXPECT_TRUE(
        RunStep(link.get(), {.step = 1, .layers = 4, .rows_of_lane = {1, 1}}, 1, &mismatches).ok());
    link.reset();
    std::string open;
    // "descriptors mappings attached"
    EXPECT_TRUE(Eventually([&] {
      open = worker.Ask("open");
      return open.ends_with(" 0 0");
    })) << open;
    if (round == 0) before = open;
    EXPECT_EQ(open, before);
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, LinkDeath, ::testing::Values("apart", "colocated"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tandem::testing
