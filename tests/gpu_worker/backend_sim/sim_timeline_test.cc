// Resources of the simulated machine: order, overlap and events in virtual time; in wall mode the
// same order between threads.

#include "gpu_worker/backend_sim/sim_timeline.h"

#include <gtest/gtest.h>

#include <vector>

#include "gpu_worker/backend_sim/sim_device.h"

namespace tandem::gpu {
namespace {

constexpr auto kCompute = SimResource::kCompute;
constexpr auto kCopy = SimResource::kCopy;

void PostWork(SimTimeline& timeline, SimResource resource, int64_t duration_ns) {
  timeline.Post(resource,
                [&timeline, resource, duration_ns] { timeline.Advance(resource, duration_ns); });
}

TEST(SimTimeline, HostTimeMovesWhenItWaits) {
  SimTimeline timeline({});
  PostWork(timeline, kCompute, 100);
  PostWork(timeline, kCompute, 50);
  EXPECT_EQ(timeline.NowNs(), 0);
  EXPECT_EQ(timeline.TimeNs(kCompute), 150);
  timeline.Drain(kCompute);
  EXPECT_EQ(timeline.NowNs(), 150);
  timeline.AdvanceHostNs(1000);
  PostWork(timeline, kCompute, 1);  // starts when it is posted
  EXPECT_EQ(timeline.TimeNs(kCompute), 1151);
  EXPECT_EQ(timeline.BusyNs(kCompute), 151);
}

TEST(SimTimeline, StreamsOverlapUntilAnEventOrdersThem) {
  SimTimeline timeline({});
  PostWork(timeline, kCopy, 300);
  timeline.RecordEvent(kCopy, 0);
  PostWork(timeline, kCopy, 400);
  PostWork(timeline, kCompute, 100);
  EXPECT_EQ(timeline.TimeNs(kCompute), 100);
  timeline.WaitEvent(kCompute, 0);
  PostWork(timeline, kCompute, 10);
  EXPECT_EQ(timeline.TimeNs(kCompute), 310);
  EXPECT_EQ(timeline.TimeNs(kCopy), 700);
}

TEST(SimTimeline, WaitTakesTheLastRecordPostedBeforeIt) {
  SimTimeline timeline({});
  timeline.WaitEvent(kCompute, 5);  // never recorded: nothing to wait for
  PostWork(timeline, kCopy, 10);
  timeline.RecordEvent(kCopy, 5);
  PostWork(timeline, kCopy, 10);
  timeline.RecordEvent(kCopy, 5);
  timeline.WaitEvent(kCompute, 5);
  EXPECT_EQ(timeline.TimeNs(kCompute), 20);
}

TEST(SimTimeline, WallModeKeepsTheOrderOfEachResourceAndOfEvents) {
  SimTimeline timeline({.mode = SimMode::kWall, .dilation = 20});
  std::vector<int> compute;  // of that stream's thread
  std::vector<int> copied(8, 0);
  for (int i = 0; i < 8; ++i) {
    timeline.Post(kCopy, [&timeline, &copied, i] {
      timeline.Advance(kCopy, 2000);
      timeline.Pace(kCopy);
      copied[static_cast<size_t>(i)] = 1;
    });
    timeline.RecordEvent(kCopy, i % 2);
    timeline.WaitEvent(kCompute, i % 2);
    timeline.Post(kCompute, [&, i] {
      EXPECT_EQ(copied[static_cast<size_t>(i)], 1);
      EXPECT_GE(timeline.TimeNs(kCompute), 2000 * (i + 1));
      compute.push_back(i);
    });
  }
  timeline.Drain(kCompute);
  EXPECT_EQ(compute, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_GE(timeline.NowNs(), timeline.TimeNs(kCompute));  // its time has come
}

TEST(SimTimeline, SwitchGoesOnFromTheSameTime) {
  SimTimeline timeline({});
  PostWork(timeline, kCompute, 5000);
  PostWork(timeline, kCopy, 9000);
  timeline.Switch({.mode = SimMode::kWall, .dilation = 20});
  EXPECT_GE(timeline.NowNs(), 9000);
  PostWork(timeline, kCompute, 1000);
  timeline.Drain(kCompute);
  const int64_t wall_ns = timeline.TimeNs(kCompute);
  EXPECT_GE(wall_ns, 10'000);  // not before it was posted
  timeline.Switch({});
  const int64_t begin_ns = timeline.NowNs();
  EXPECT_GE(begin_ns, wall_ns);
  PostWork(timeline, kCompute, 70);
  timeline.Drain(kCompute);
  EXPECT_EQ(timeline.NowNs(), begin_ns + 70);
}

TEST(SimPcie, LargeCopiesQueueAndSmallTransfersShare) {
  SimMachine machine;
  machine.to_device_gbps = 10;
  machine.to_host_gbps = 20;
  SimPcie pcie(machine);
  EXPECT_EQ(pcie.TransferNs(PcieWay::kToDevice, 1000, 0), 100);
  EXPECT_EQ(pcie.TransferNs(PcieWay::kToHost, 1000, 0), 50);
  EXPECT_EQ(pcie.CopyEndNs(PcieWay::kToDevice, 10000, 500), 1500);
  EXPECT_EQ(pcie.CopyEndNs(PcieWay::kToDevice, 10000, 600), 2500);
  // Half of the bandwidth while copies last, and they last longer for it.
  EXPECT_EQ(pcie.TransferNs(PcieWay::kToDevice, 1000, 700), 200);
  EXPECT_EQ(pcie.CopyEndNs(PcieWay::kToDevice, 0, 0), 2600);
  EXPECT_EQ(pcie.TransferNs(PcieWay::kToHost, 1000, 700), 50);      // the other way is free
  EXPECT_EQ(pcie.TransferNs(PcieWay::kToDevice, 1000, 2600), 100);  // copies are over
}

}  // namespace
}  // namespace tandem::gpu
