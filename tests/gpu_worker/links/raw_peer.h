// Either end of a link without its code: makes the handover by hand, so that tests can break every
// rule of it and write anything into the segment.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "common/shm/handover.h"
#include "common/shm/life_lock.h"
#include "common/shm/segment.h"

namespace tandem::testing {

inline shm::Deadline In(int ms) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
}

shm::Hello HelloFor(const shm::LinkTicket& ticket, int threads);

// A gpu worker's end: handover done, nothing submitted.
class RawGpuPeer {
 public:
  static absl::StatusOr<std::unique_ptr<RawGpuPeer>> Attach(const shm::LinkTicket& ticket,
                                                            const shm::BatchLimits& limits);

  const shm::SegmentView& view() const { return segment_.view(); }
  uint64_t epoch() const { return epoch_; }
  // Rings all pairs with `sequence` and waits for the answer; nullopt when none comes within ms.
  // The answer is the RefuseCode.
  std::optional<uint32_t> Submit(uint64_t sequence, int ms);
  bool aborted() const { return shm::LoadAcquire(view().control()->abort.value) != 0; }

 private:
  RawGpuPeer(shm::Segment segment, shm::UniqueFd socket, uint64_t epoch, uint32_t pairs)
      : segment_(std::move(segment)), socket_(std::move(socket)), epoch_(epoch), pairs_(pairs) {}

  shm::Segment segment_;
  shm::UniqueFd socket_;
  uint64_t epoch_;
  uint32_t pairs_;
  std::unique_ptr<shm::LifeLock> life_;
};

}  // namespace tandem::testing
