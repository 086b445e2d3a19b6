#include "common/base/trace.h"

#include <gtest/gtest.h>

#include <thread>

namespace tandem {
namespace {

constexpr TraceKind kWork = {.name = "work", .args = {"number", "twice"}};
constexpr TraceKind kPause = {.name = "pause", .role = TraceRole::kStall};

TEST(Trace, RecordsNothingWhenOff) {
  Tracer tracer;
  TraceTrack* const track = tracer.AddTrack("thread");
  EXPECT_FALSE(track->on());
  { const TraceSpan span(*track, kWork, {1}); }
  TraceLaps laps(*track);
  laps.Lap(kWork);
  laps.Lap(kWork);
  { const TraceSpan span(*TraceTrack::None(), kWork); }
  ASSERT_TRUE(tracer.Start().ok());
  const TraceLog log = tracer.Stop();
  ASSERT_EQ(log.tracks.size(), 1u);
  EXPECT_TRUE(log.tracks[0].events.empty());
  EXPECT_EQ(log.tracks[0].dropped, 0u);
}

TEST(Trace, SpansNestAndCarryTheirArguments) {
  Tracer tracer;
  TraceTrack* const track = tracer.AddTrack("thread");
  ASSERT_TRUE(tracer.Start().ok());
  {
    const TraceSpan outer(*track, kWork, {7, 14});
    const TraceSpan inner(*track, kPause);
  }
  const TraceLog log = tracer.Stop();
  ASSERT_EQ(log.tracks[0].events.size(), 2u);
  const TraceEvent& inner = log.tracks[0].events[0];
  const TraceEvent& outer = log.tracks[0].events[1];
  EXPECT_EQ(inner.kind, &kPause);
  EXPECT_EQ(outer.kind, &kWork);
  EXPECT_EQ(outer.args, (TraceArgs{7, 14}));
  EXPECT_LE(log.begin_ns, outer.begin_ns);
  EXPECT_LE(outer.begin_ns, inner.begin_ns);
  EXPECT_LE(inner.begin_ns, inner.end_ns);
  EXPECT_LE(inner.end_ns, outer.end_ns);
  EXPECT_LE(outer.end_ns, log.end_ns);
}

TEST(Trace, LapsHaveNoGaps) {
  Tracer tracer;
  TraceTrack* const track = tracer.AddTrack("thread");
  ASSERT_TRUE(tracer.Start().ok());
  TraceLaps laps(*track);
  for (int64_t i = 0; i < 4; ++i) laps.Lap(kWork, {i});
  const std::vector<TraceEvent> events = tracer.Stop().tracks[0].events;
  ASSERT_EQ(events.size(), 3u);  // the first only marks the beginning
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].args.a, static_cast<int64_t>(i) + 1);
    if (i > 0) {
      EXPECT_EQ(events[i].begin_ns, events[i - 1].end_ns);
    }
  }
}

TEST(Trace, FullRingDropsAndCountsAndGoesOnOnceDrained) {
  Tracer tracer({.ring_events = 4});
  TraceTrack* const track = tracer.AddTrack("thread");
  ASSERT_TRUE(tracer.Start().ok());
  const int64_t now = TraceNowNs();
  for (int64_t i = 0; i < 6; ++i) track->Add(kWork, now, now + i, {i});
  tracer.Drain();
  for (int64_t i = 6; i < 9; ++i) track->Add(kWork, now, now + i, {i});
  const TraceLog log = tracer.Stop();
  std::vector<int64_t> seen;
  for (const TraceEvent& event : log.tracks[0].events) seen.push_back(event.args.a);
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 2, 3, 6, 7, 8}));
  EXPECT_EQ(log.tracks[0].dropped, 2u);
}

TEST(Trace, RecordingIsBounded) {
  Tracer tracer({.ring_events = 8, .max_events = 5});
  TraceTrack* const a = tracer.AddTrack("a");
  TraceTrack* const b = tracer.AddTrack("b");
  ASSERT_TRUE(tracer.Start().ok());
  const int64_t now = TraceNowNs();
  for (TraceTrack* track : {a, b}) {
    for (int i = 0; i < 4; ++i) track->Add(kWork, now, now);
  }
  const TraceLog log = tracer.Stop();
  EXPECT_EQ(log.tracks[0].events.size(), 4u);
  EXPECT_EQ(log.tracks[1].events.size(), 1u);
  EXPECT_EQ(log.tracks[1].dropped, 3u);
}

TEST(Trace, OneRecordingAtATimeAndNoneSeesAnothersEvents) {
  Tracer tracer;
  TraceTrack* const track = tracer.AddTrack("thread");
  ASSERT_TRUE(tracer.Start().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(tracer.Start()));
  {
    const TraceSpan spans_the_end(*track, kWork);
    EXPECT_TRUE(tracer.Stop().tracks[0].events.empty());
  }
  ASSERT_TRUE(tracer.Start().ok());
  track->Add(kWork, 1, TraceNowNs());  // began long ago
  EXPECT_TRUE(tracer.Stop().tracks[0].events.empty());
}

TEST(Trace, TrackThatComesDuringARecordingIsInIt) {
  Tracer tracer;
  ASSERT_TRUE(tracer.Start().ok());
  TraceTrack* const track = tracer.AddTrack("late");
  { const TraceSpan span(*track, kWork); }
  const TraceLog log = tracer.Stop();
  ASSERT_EQ(log.tracks.size(), 1u);
  EXPECT_EQ(log.tracks[0].name, "late");
  EXPECT_EQ(log.tracks[0].events.size(), 1u);
}

// Writers never wait, so what the reader misses is dropped: every event is either seen, whole and
// in order, or counted.
TEST(Trace, DrainsWhileThreadsWrite) {
  constexpr int64_t kEvents = 20'000;
  constexpr int kThreads = 3;
  Tracer tracer({.ring_events = 64});
  ASSERT_TRUE(tracer.Start().ok());
  std::atomic<int> writing{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, track = tracer.AddTrack("writer")] {
      const int64_t now = TraceNowNs();
      for (int64_t i = 1; i <= kEvents; ++i) track->Add(kWork, now, now + i, {i, 2 * i});
      writing.fetch_sub(1);
    });
  }
  while (writing.load() > 0) tracer.Drain();
  for (std::thread& thread : threads) thread.join();
  const TraceLog log = tracer.Stop();
  for (const TraceLog::Track& track : log.tracks) {
    EXPECT_EQ(track.events.size() + track.dropped, static_cast<size_t>(kEvents));
    int64_t last = 0;
    for (const TraceEvent& event : track.events) {
      ASSERT_GT(event.args.a, last);
      last = event.args.a;
      ASSERT_EQ(event.args.b, 2 * last);
      ASSERT_EQ(event.end_ns - event.begin_ns, last);
    }
  }
}

// Threads that are in the middle of anything when recordings begin and end.
TEST(Trace, SwitchesWhileThreadsWrite) {
  Tracer tracer({.ring_events = 64});
  std::atomic<bool> stop{false};
  std::thread thread([&, track = tracer.AddTrack("writer")] {
    TraceLaps laps(*track);
    while (!stop.load()) {
      const TraceSpan span(*track, kWork, {1, 2});
      laps.Lap(kPause);
    }
  });
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(tracer.Start().ok());
    const TraceLog log = tracer.Stop();
    for (const TraceEvent& event : log.tracks[0].events) {
      ASSERT_GE(event.begin_ns, log.begin_ns);
      ASSERT_LE(event.begin_ns, event.end_ns);
    }
  }
  stop.store(true);
  thread.join();
}

}  // namespace
}  // namespace tandem
