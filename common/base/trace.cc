#include "common/base/trace.h"

#include <bit>
#include <utility>

#include "common/base/check.h"

namespace tandem {

TraceTrack* TraceTrack::None() {
  static constinit TraceTrack none;
  return &none;
}

void TraceTrack::Add(const TraceKind& kind, int64_t begin_ns, int64_t end_ns, TraceArgs args) {
  TraceEvent* const ring = ring_.load(std::memory_order_acquire);
  if (ring == nullptr) return;
  const uint64_t head = head_.load(std::memory_order_relaxed);
  if (head - tail_seen_ > mask_) {
    // Acquire: what the reader read of this slot is behind it.
    tail_seen_ = tail_.load(std::memory_order_acquire);
    if (head - tail_seen_ > mask_) {
      dropped_.store(dropped_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      return;
    }
  }
  ring[head & mask_] = {&kind, begin_ns, end_ns, args};
  head_.store(head + 1, std::memory_order_release);
}

void TraceLaps::Record(const TraceKind& kind, TraceArgs args) {
  const int64_t now_ns = TraceNowNs();
  if (since_ns_ != 0) track_.Add(kind, since_ns_, now_ns, args);
  since_ns_ = now_ns;
}

Tracer::Tracer(const Options& options) : options_(options) {
  TANDEM_CHECK(std::has_single_bit(options.ring_events));
}

TraceTrack* Tracer::AddTrack(std::string name) {
  const std::lock_guard lock(mutex_);
  Owned& owned = owned_.emplace_back();
  owned.name = std::move(name);
  owned.track.mask_ = options_.ring_events - 1;
  if (recording_) SwitchOn(owned);
  return &owned.track;
}

void Tracer::SwitchOn(Owned& owned) {
  TraceTrack& track = owned.track;
  if (owned.ring == nullptr) {
    owned.ring = std::make_unique<TraceEvent[]>(options_.ring_events);
    track.ring_.store(owned.ring.get(), std::memory_order_release);
  }
  // What a span of the recording before has left.
  track.tail_.store(track.head_.load(std::memory_order_acquire), std::memory_order_release);
  owned.dropped_before = track.dropped_.load(std::memory_order_relaxed);
  log_.tracks.push_back({.name = owned.name, .events = {}, .dropped = 0});
  track.on_.store(true, std::memory_order_relaxed);
}

absl::Status Tracer::Start() {
  const std::lock_guard lock(mutex_);
  if (recording_) {
    return absl::FailedPreconditionError("a trace of this process is being recorded already");
  }
  recording_ = true;
  events_ = 0;
  log_ = {};
  log_.begin_ns = TraceNowNs();
  for (Owned& owned : owned_) SwitchOn(owned);
  return absl::OkStatus();
}

void Tracer::Drain() {
  const std::lock_guard lock(mutex_);
  if (recording_) DrainLocked();
}

void Tracer::DrainLocked() {
  auto log = log_.tracks.begin();
  for (Owned& owned : owned_) DrainTrack(owned.track, *log++);
}

void Tracer::DrainTrack(TraceTrack& track, TraceLog::Track& log) {
  const uint64_t head = track.head_.load(std::memory_order_acquire);
  const TraceEvent* const ring = track.ring_.load(std::memory_order_relaxed);
  for (uint64_t i = track.tail_.load(std::memory_order_relaxed); i < head; ++i) {
    const TraceEvent& event = ring[i & track.mask_];
    if (event.begin_ns < log_.begin_ns) continue;
    if (events_ == options_.max_events) {
      ++log.dropped;
      continue;
    }
    log.events.push_back(event);
    ++events_;
  }
  track.tail_.store(head, std::memory_order_release);
}

TraceLog Tracer::Stop() {
  const std::lock_guard lock(mutex_);
  for (Owned& owned : owned_) owned.track.on_.store(false, std::memory_order_relaxed);
  DrainLocked();
  log_.end_ns = TraceNowNs();
  auto log = log_.tracks.begin();
  for (Owned& owned : owned_) {
    const uint64_t dropped = owned.track.dropped_.load(std::memory_order_relaxed);
    (log++)->dropped += dropped - owned.dropped_before;
  }
  recording_ = false;
  return std::exchange(log_, {});
}

}  // namespace tandem
