// One gpu worker's attachment to this expert worker: the segment and the SPMD service of its
// submissions.
//
// Serve is called by every compute thread and returns on all of them once the attachment has ended
// and the submission in progress is finished. End may be called from any thread, any number of
// times; it never blocks. Sleeping threads are woken by End, but a wake-up may fall between a
// thread's look and its sleep: the owner repeats WakeAll until Serve has returned everywhere.
//
// The peer writes into the segment at any time: a header is copied and checked once by one thread,
// ids are checked while they are copied, a slot that fails is answered with a RefuseCode and costs
// nothing else; a doorbell that jumps ends the attachment.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "common/base/trace.h"
#include "common/shm/expert_batch.h"
#include "common/shm/segment.h"
#include "common/shm/slot_check.h"
#include "common/shm/team_barrier.h"
#include "common/shm/thread_pairs.h"

namespace tandem::expert {

struct LinkCounters {
  std::atomic<uint64_t> batches{0};
  std::atomic<uint64_t> refused_slots{0};
};

class LinkAttachment {
 public:
  struct Options {
    uint64_t epoch = 0;
    shm::Placement placement = shm::Placement::kApart;  // resolved
    std::vector<shm::ThreadPair> pairs;
    int threads = 1;
    std::chrono::milliseconds peer_deadline{1500};
    std::chrono::microseconds spin{20000};
    std::vector<TraceTrack*> tracks;  // one a thread; empty: no timeline
    std::function<void()> on_end;     // called once, from whatever thread ends it; must not block
  };

  LinkAttachment(shm::Segment segment, Options options);
  LinkAttachment(const LinkAttachment&) = delete;
  LinkAttachment& operator=(const LinkAttachment&) = delete;

  void Serve(shm::BatchHandler* handler, shm::TeamBarrier* barrier, LinkCounters* counters,
             int thread);
  void End();
  void WakeAll() const;

  bool ended() const { return ended_.load(std::memory_order_acquire); }
  shm::Segment& segment() { return segment_; }
  bool colocated() const { return options_.placement == shm::Placement::kColocated; }

 private:
  // False when the attachment has ended.
  bool AwaitRing(uint64_t sequence, int thread, shm::TeamBarrier* barrier);
  bool AwaitBell(const shm::Doorbell& bell, uint64_t sequence, shm::TeamBarrier* barrier);
  void Meet(shm::TeamBarrier* barrier);
  void TakeSlot(uint64_t sequence);
  bool CopyShareOfPicks(uint64_t sequence, uint64_t begin, uint64_t end);
  const shm::PickBuffers& picks(uint64_t sequence) const { return picks_[sequence % 2]; }
  void RunBatch(shm::BatchHandler* handler, shm::TeamBarrier* barrier, uint64_t sequence,
                int thread);
  shm::RefuseCode Outcome(LinkCounters* counters, int thread);
  void RunDeferred(shm::BatchHandler* handler, const shm::ExpertBatch& batch, int thread);
  void StoreTimes(const shm::ExpertBatch& batch, int64_t end_ns) const;

  shm::Segment segment_;
  const shm::SegmentView view_;
  const Options options_;
  const shm::SpinPolicy meet_policy_;
  const int header_thread_;
  std::vector<std::vector<uint32_t>> pairs_of_thread_;

  std::atomic<bool> ended_{false};
  std::atomic<bool> missed_{false};    // some thread's doorbell did not come: all leave
  std::atomic<bool> bad_pick_{false};  // of the current batch
  // Written by the header thread between two barriers, read by all after them.
  shm::ExpertBatch batch_;
  shm::RefuseCode code_ = shm::RefuseCode::kAccepted;
  bool split_picks_ = false;
  bool has_deferred_ = false;
  // The header thread's own, of the current batch.
  int64_t begin_ns_ = 0;
  int64_t reply_ns_ = 0;

  // Two sets by turns: the deferred picks of a batch are still read while the next slot is taken.
  std::unique_ptr<uint16_t[]> ids_;
  std::unique_ptr<float[]> weights_;
  std::unique_ptr<uint8_t[]> deferred_;
  shm::PickBuffers picks_[2];
};

}  // namespace tandem::expert
