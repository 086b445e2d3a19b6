#include "expert_worker/link_attachment.h"

#include <utility>

#include "common/base/check.h"

namespace tandem::expert {
namespace {

using shm::RefuseCode;

constexpr int64_t kNsPerUs = 1000;
constexpr int64_t kForeverNs = int64_t{3600} * 1'000'000'000;
// How long a half-rung submission sleeps between looks at the peer's progress.
constexpr int64_t kStallSliceNs = 100'000'000;
// Between looks at `step_active` while spinning for a doorbell.
constexpr int64_t kSpinChunkNs = 50'000;
// Co-located threads wait for their team a little (the others finish within the imbalance of a
// batch), giving the core to whoever else wants it, before a sleep that costs a wake-up across
// cores (40-70 us).
constexpr int64_t kColocatedMeetNs = 200'000;
// One thread copies that many picks in about 2 us, as much as another barrier with its skew costs.
constexpr uint64_t kPicksOfOneThread = 2048;

// What a compute thread does, without gaps: waiting, computing, waiting for its team, replying and
// computing what was deferred.
constexpr std::array<const char*, 4> kBatchArgs = {"step", "layer", "lane", "rows"};
constexpr TraceKind kTraceIdle = {"between steps", TraceRole::kIdle, kBatchArgs};
constexpr TraceKind kTraceBubble = {"bubble", TraceRole::kStall, kBatchArgs};
constexpr TraceKind kTraceExperts = {"experts", TraceRole::kCompute, kBatchArgs};
constexpr TraceKind kTraceJoin = {"join", TraceRole::kStall, kBatchArgs};
constexpr TraceKind kTraceDeferred = {"deferred experts", TraceRole::kBusy, kBatchArgs};

TraceArgs ArgsOf(const shm::ExpertBatch& batch) {
  return {static_cast<int64_t>(batch.step), batch.layer, batch.lane, batch.rows};
}

shm::SpinPolicy MeetPolicy(const LinkAttachment::Options& options) {
  if (options.placement == shm::Placement::kColocated) {
    return {.spin_ns = kColocatedMeetNs, .yield = true};
  }
  return {.spin_ns = options.spin.count() * kNsPerUs, .yield = false};
}

}  // namespace

LinkAttachment::LinkAttachment(shm::Segment segment, Options options)
    : segment_(std::move(segment)),
      view_(segment_.view()),
      options_(std::move(options)),
      meet_policy_(MeetPolicy(options_)),
      header_thread_(options_.pairs.at(0).expert) {
  TANDEM_CHECK(options_.tracks.empty() ||
               options_.tracks.size() == static_cast<size_t>(options_.threads));
  for (int thread = 0; thread < options_.threads; ++thread) {
    pairs_of_thread_.push_back(shm::PairsOfExpert(options_.pairs, thread));
  }
  const shm::BatchLimits& limits = view_.layout().limits;
  const size_t picks = size_t{limits.max_rows} * limits.top_k;
  ids_ = std::make_unique<uint16_t[]>(2 * picks);
  weights_ = std::make_unique<float[]>(2 * picks);
  deferred_ = std::make_unique<uint8_t[]>(2 * picks);
  picks_[0] = {ids_.get(), weights_.get(), deferred_.get()};
  picks_[1] = {ids_.get() + picks, weights_.get() + picks, deferred_.get() + picks};
}

void LinkAttachment::End() {
  if (ended_.exchange(true, std::memory_order_acq_rel)) return;
  shm::StoreRelease(view_.control()->abort.value, 1);
  WakeAll();
  if (options_.on_end) options_.on_end();
}

void LinkAttachment::WakeAll() const {
  for (uint32_t i = 0; i < options_.pairs.size(); ++i) {
    shm::SubmitBell(view_.pair(i)).WakeSleepers();
    shm::DoneBell(view_.pair(i)).WakeSleepers();
  }
}

void LinkAttachment::Serve(shm::BatchHandler* handler, shm::TeamBarrier* barrier,
                           LinkCounters* counters, int thread) {
  TraceLaps laps(*(options_.tracks.empty() ? TraceTrack::None() : options_.tracks[thread]));
  uint64_t step = 0;
  for (uint64_t sequence = 1;; ++sequence) {
    if (!AwaitRing(sequence, thread, barrier)) {
      missed_.store(true, std::memory_order_relaxed);
    } else if (thread == header_thread_) {
      TakeSlot(sequence);
    }
    Meet(barrier);
    // Nobody writes it between this barrier and the next, so all threads decide alike.
    if (missed_.load(std::memory_order_relaxed)) return;
    const shm::ExpertBatch batch = batch_;
    const TraceArgs args = ArgsOf(batch);
    laps.Lap(std::exchange(step, batch.step) == batch.step ? kTraceBubble : kTraceIdle, args);
    RunBatch(handler, barrier, sequence, thread);
    laps.Lap(kTraceExperts, args);
    // Before the barrier: right after it, the next slot may be taken.
    const RefuseCode code = Outcome(counters, thread);
    const bool run_deferred = code == RefuseCode::kAccepted && has_deferred_;
    barrier->Wait(meet_policy_);
    if (thread == header_thread_ && code == RefuseCode::kAccepted) {
      reply_ns_ = shm::NowNs();
      StoreTimes(batch, reply_ns_);
    }
    laps.Lap(kTraceJoin, args);
    const uint16_t reply = shm::MakeReply(sequence, static_cast<uint32_t>(code));
    for (const uint32_t pair : pairs_of_thread_[thread]) {
      shm::StoreReply(view_.pair(pair)->done_seq, view_.slot_index(sequence), reply);
      shm::DoneBell(view_.pair(pair)).Ring(sequence);
    }
    if (run_deferred) {
      RunDeferred(handler, batch, thread);
      laps.Lap(kTraceDeferred, args);
    }
  }
}

void LinkAttachment::RunDeferred(shm::BatchHandler* handler, const shm::ExpertBatch& batch,
                                 int thread) {
  handler->RunDeferred(batch, thread, options_.threads);
  // The others end about then too: they share the work.
  if (thread == header_thread_) StoreTimes(batch, shm::NowNs());
}

// `step` is the last word stored: an entry that is half of another step has the old one.
void LinkAttachment::StoreTimes(const shm::ExpertBatch& batch, int64_t end_ns) const {
  shm::StoreWords(view_.times(batch.lane, batch.layer),
                  shm::TimesEntry{.begin_ns = static_cast<uint64_t>(begin_ns_),
                                  .reply_ns = static_cast<uint64_t>(reply_ns_),
                                  .end_ns = static_cast<uint64_t>(end_ns),
                                  .step = batch.step});
}

bool LinkAttachment::AwaitRing(uint64_t sequence, int thread, shm::TeamBarrier* barrier) {
  for (const uint32_t pair : pairs_of_thread_[thread]) {
    if (!AwaitBell(shm::SubmitBell(view_.pair(pair)), sequence, barrier)) return false;
  }
  return true;
}

bool LinkAttachment::AwaitBell(const shm::Doorbell& bell, uint64_t sequence,
                               shm::TeamBarrier* barrier) {
  const shm::ControlPage* control = view_.control();
  int64_t spin_until_ns = shm::NowNs() + options_.spin.count() * kNsPerUs;
  while (true) {
    const uint64_t rung = bell.Read();
    if (rung >= sequence) {
      if (rung - sequence < view_.layout().slots) return true;
      End();  // more outstanding than there are slots: the peer does not keep the protocol
      return false;
    }
    if (ended()) return false;
    if (shm::LoadAcquire(control->abort.value) != 0) {
      End();
      return false;
    }
    const bool spin = !colocated() && shm::LoadAcquire(control->step_active.value) == 1;
    if (spin && shm::NowNs() < spin_until_ns) {
      shm::SpinUntil({.spin_ns = kSpinChunkNs, .yield = false},
                     [&] { return bell.Read() >= sequence || ended(); });
      if (bell.Read() < sequence) shm::YieldCpu();  // costs nothing where the core is ours
      continue;
    }
    bell.Sleep(rung, kForeverNs);
    // Woken, with the work or ahead of it: the rest of the team is to be up as well.
    if (!colocated()) barrier->Nudge();
    spin_until_ns = shm::NowNs() + options_.spin.count() * kNsPerUs;
  }
}

// The barrier behind the doorbells. Co-located, a thread may wait here for one whose doorbell the
// peer has not rung: a peer that makes no progress meanwhile is given up.
void LinkAttachment::Meet(shm::TeamBarrier* barrier) {
  if (!colocated()) {
    barrier->Wait(meet_policy_);
    return;
  }
  const shm::ControlPage* control = view_.control();
  const int64_t deadline_ns = options_.peer_deadline.count() * 1000 * kNsPerUs;
  int64_t since_ns = 0;
  uint64_t seen = 0;
  barrier->Wait(meet_policy_, kStallSliceNs, [&] {
    const uint64_t ticks = shm::LoadAcquire(control->gpu_ticks.value);
    const int64_t now_ns = shm::NowNs();
    if (since_ns == 0 || ticks != seen) {
      since_ns = now_ns;
      seen = ticks;
    } else if (now_ns - since_ns > deadline_ns) {
      End();
    }
  });
}

void LinkAttachment::TakeSlot(uint64_t sequence) {
  const shm::BatchLimits& limits = view_.layout().limits;
  const shm::SlotHeader header = shm::CopyOnce(*view_.header(sequence));
  shm::ControlPage* control = view_.control();
  begin_ns_ = shm::NowNs();
  shm::AddRelaxed(control->expert_ticks.value, 1);
  bad_pick_.store(false, std::memory_order_relaxed);
  split_picks_ = false;
  has_deferred_ = false;
  code_ = shm::CheckHeader(header, limits, sequence, options_.epoch);
  batch_ = {};
  if (code_ != RefuseCode::kAccepted) return;
  has_deferred_ = header.has_deferred == 1;
  batch_.step = header.step;
  batch_.epoch = options_.epoch;
  batch_.lane = header.lane;
  batch_.layer = header.layer;
  batch_.rows = header.rows;
  batch_.top_k = limits.top_k;
  batch_.hidden = limits.hidden;
  batch_.row_type = limits.row_type;
  batch_.flags = header.flags;
  batch_.x = view_.x(sequence);
  batch_.ids = picks(sequence).ids;
  batch_.weights = picks(sequence).weights;
  batch_.deferred = has_deferred_ ? picks(sequence).deferred : nullptr;
  batch_.out = view_.results(sequence);
  static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));
  batch_.ticks = reinterpret_cast<std::atomic<uint64_t>*>(&control->expert_ticks.value);
  const uint64_t count = uint64_t{batch_.rows} * batch_.top_k;
  split_picks_ = options_.threads > 1 && count > kPicksOfOneThread;
  if (!split_picks_ && !CopyShareOfPicks(sequence, 0, count)) code_ = RefuseCode::kExpert;
}

bool LinkAttachment::CopyShareOfPicks(uint64_t sequence, uint64_t begin, uint64_t end) {
  return shm::CopyPicks(view_.ids(sequence), view_.weights(sequence),
                        has_deferred_ ? view_.deferred(sequence) : nullptr, begin, end,
                        view_.layout().limits.num_experts, picks(sequence));
}

void LinkAttachment::RunBatch(shm::BatchHandler* handler, shm::TeamBarrier* barrier,
                              uint64_t sequence, int thread) {
  if (code_ != RefuseCode::kAccepted) return;
  if (split_picks_) {
    const uint64_t count = uint64_t{batch_.rows} * batch_.top_k;
    const auto threads = static_cast<uint64_t>(options_.threads);
    const uint64_t begin = count * static_cast<uint64_t>(thread) / threads;
    const uint64_t end = count * (static_cast<uint64_t>(thread) + 1) / threads;
    if (!CopyShareOfPicks(sequence, begin, end)) bad_pick_.store(true, std::memory_order_relaxed);
    barrier->Wait(meet_policy_);
    if (bad_pick_.load(std::memory_order_relaxed)) return;
  }
  handler->Run(batch_, thread, options_.threads);
}

RefuseCode LinkAttachment::Outcome(LinkCounters* counters, int thread) {
  const RefuseCode code = bad_pick_.load(std::memory_order_relaxed) ? RefuseCode::kExpert : code_;
  if (thread == header_thread_) {
    (code == RefuseCode::kAccepted ? counters->batches : counters->refused_slots)
        .fetch_add(1, std::memory_order_relaxed);
    shm::AddRelaxed(view_.control()->expert_ticks.value, 1);
  }
  return code;
}

}  // namespace tandem::expert
