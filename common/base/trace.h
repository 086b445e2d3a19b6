#pragma once

// The timeline of a process: what each of its threads, or a device's queue, did from when to when.
//
//   Tracer tracer;                                    // made in main, outlives all that records
//   TraceTrack* track = tracer.AddTrack("executor");  // once, by whoever owns the thread
//   { TraceSpan span(*track, kAttention, {step, layer}); ... }   // on that thread
//   track->Add(kCopy, begin_ns, end_ns, {bytes});     // where the times come from a device
//
// Off (the usual state) a span costs one relaxed load. On, it costs two readings of the clock and
// the store of one event into the track's own ring: no lock, no allocation, nothing shared with
// other threads. A ring that is full drops new events and counts them; its memory is allocated when
// its track is first recorded and kept from then on.
//
// Recording: Start, Drain often enough that no ring overflows, Stop. One recording at a time.
//
// Thread safety: a track has one writer at a time; all methods of Tracer may be called from any
// thread, but Drain and Stop belong to whoever Start said OK to. Ownership: tracks live as long as
// their tracer; kinds are constants of the program. Times: CLOCK_MONOTONIC, nanoseconds.

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tandem {

// What an event says of its thread. Busy and stall events of one track never overlap; frames
// enclose them.
enum class TraceRole : uint8_t {
  kFrame = 0,
  kStep,     // a frame that is a whole step
  kBusy,     // it works
  kStall,    // it waits for another side in the middle of a step
  kIdle,     // it waits, with nothing to do
  kSend,     // busy: hands rows to the experts
  kCompute,  // busy: computes what was sent
  kCollect,  // stall: waits for what was sent to come back
};

// One kind of event. `args` names an event's numbers; null: it has no more. Those of kSend,
// kCompute and kCollect begin with step, layer, lane: equal ones belong together.
struct TraceKind {
  const char* name;
  TraceRole role = TraceRole::kBusy;
  std::array<const char*, 4> args = {};
};

// Up to four numbers, in the order of their kind's names. Not an array: compilers keep these in
// registers, so that a span that is off stores nothing.
struct TraceArgs {
  int64_t a = 0;
  int64_t b = 0;
  int64_t c = 0;
  int64_t d = 0;

  bool operator==(const TraceArgs&) const = default;
};

struct TraceEvent {
  const TraceKind* kind = nullptr;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  TraceArgs args = {};
};

inline int64_t TraceNowNs() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A ring of one writer and one reader. One that was not made by a tracer is never on.
class TraceTrack {
 public:
  TraceTrack() = default;
  TraceTrack(const TraceTrack&) = delete;
  TraceTrack& operator=(const TraceTrack&) = delete;

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // Records an event whether or not the track is on; one that began before the recording is left
  // out of it. Events of a track are best added in the order of their ends.
  void Add(const TraceKind& kind, int64_t begin_ns, int64_t end_ns, TraceArgs args = {});

  // For objects that nobody gave a track.
  static TraceTrack* None();

 private:
  friend class Tracer;
  static constexpr size_t kLineBytes = 64;

  std::atomic<bool> on_{false};
  std::atomic<TraceEvent*> ring_{nullptr};  // [mask_ + 1]
  uint64_t mask_ = 0;
  // The writer's.
  alignas(kLineBytes) std::atomic<uint64_t> head_{0};
  uint64_t tail_seen_ = 0;
  std::atomic<uint64_t> dropped_{0};
  // The reader's.
  alignas(kLineBytes) std::atomic<uint64_t> tail_{0};
};

// From its construction to its end, when the track was on at its construction.
class TraceSpan {
 public:
  TraceSpan(TraceTrack& track, const TraceKind& kind, TraceArgs args = {})
      : track_(track.on() ? &track : nullptr),
        kind_(&kind),
        args_(args),
        begin_ns_(track_ != nullptr ? TraceNowNs() : 0) {}
  ~TraceSpan() {
    if (track_ != nullptr) [[unlikely]]
      track_->Add(*kind_, begin_ns_, TraceNowNs(), args_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceTrack* const track_;
  const TraceKind* const kind_;
  const TraceArgs args_;
  const int64_t begin_ns_;
};

// The phases of a loop, without gaps: each lap began when the one before ended, so that the clock
// is read once a lap.
class TraceLaps {
 public:
  explicit TraceLaps(TraceTrack& track) : track_(track) {}

  // What has passed since the last lap was `kind`. The first one only marks its beginning.
  void Lap(const TraceKind& kind, TraceArgs args = {}) {
    if (track_.on()) [[unlikely]] {
      Record(kind, args);
    } else {
      since_ns_ = 0;
    }
  }

 private:
  void Record(const TraceKind& kind, TraceArgs args);

  TraceTrack& track_;
  int64_t since_ns_ = 0;
};

// What a recording gave.
struct TraceLog {
  struct Track {
    std::string name;
    std::vector<TraceEvent> events;
    uint64_t dropped = 0;  // events that did not fit a ring or the recording
  };
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  std::vector<Track> tracks;  // in order of AddTrack
};

class Tracer {
 public:
  struct Options {
    size_t ring_events = 16384;       // a track; a power of two. 0.9 MB, 50 ms at 330,000 events/s
    size_t max_events = 1024 * 1024;  // a recording, all tracks: 64 MiB
  };

  Tracer() : Tracer(Options{}) {}
  explicit Tracer(const Options& options);
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  TraceTrack* AddTrack(std::string name);

  // FAILED_PRECONDITION while another recording runs.
  absl::Status Start();
  // Takes what was recorded so far out of the rings.
  void Drain();
  TraceLog Stop();

 private:
  struct Owned {
    std::string name;
    std::unique_ptr<TraceEvent[]> ring;
    uint64_t dropped_before = 0;  // the recording
    TraceTrack track;
  };

  void SwitchOn(Owned& owned);  // REQUIRES: mutex_
  void DrainLocked();
  void DrainTrack(TraceTrack& track, TraceLog::Track& log);

  const Options options_;
  std::mutex mutex_;
  std::deque<Owned> owned_;  // never moves its elements
  bool recording_ = false;
  size_t events_ = 0;  // of the recording
  TraceLog log_;
};

}  // namespace tandem
