// A barrier for the threads of one side, with the waiting that a link needs: the policy is chosen
// per wait (it depends on the attachment's placement), sleepers can be told to spin again ahead of
// work (Nudge), and a wait can be cut into slices so that a stalled peer is noticed. Orders memory
// like a lock. Reusable; never allocates.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/shm/waiting.h"

namespace tandem::shm {

class TeamBarrier {
 public:
  explicit TeamBarrier(int threads) : threads_(threads) {}

  // Returns when all threads have arrived. Spins, then sleeps without a time limit.
  void Wait(const SpinPolicy& policy) {
    Wait(policy, int64_t{3600} * 1000000000, [] {});
  }

  // As above; on_slice() is called by a thread that has slept for slice_ns, as often as that
  // happens.
  template <typename OnSlice>
  void Wait(const SpinPolicy& policy, int64_t slice_ns, OnSlice&& on_slice) {
    if (threads_ == 1) return;
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      Release(generation);
      return;
    }
    const auto released = [&] { return generation_.load(std::memory_order_acquire) != generation; };
    while (!SpinUntil(policy, released)) {
      const int64_t slept_from = NowNs();
      Sleep(generation, slice_ns);
      if (!released() && NowNs() - slept_from >= slice_ns) on_slice();
    }
  }

  // Sleepers spin again for their policy's time. Any thread.
  void Nudge() {
    if (sleepers_.load(std::memory_order_seq_cst) != 0) FutexWake(Futex(), kWakeAll);
  }

 private:
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  const uint32_t* Futex() const { return reinterpret_cast<const uint32_t*>(&generation_); }

  void Release(uint32_t generation) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.exchange(generation + 1, std::memory_order_seq_cst);
    Nudge();
  }

  void Sleep(uint32_t generation, int64_t timeout_ns) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (generation_.load(std::memory_order_seq_cst) == generation) {
      FutexWait(Futex(), generation, timeout_ns);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  const int threads_;
  alignas(kLineBytes) std::atomic<int> arrived_{0};
  alignas(kLineBytes) std::atomic<uint32_t> generation_{0};
  alignas(kLineBytes) std::atomic<uint32_t> sleepers_{0};
};

}  // namespace tandem::shm
