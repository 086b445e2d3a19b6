// How a thread waits for a word: spin for a while, then sleep on a futex. Shared by the doorbells
// (across processes) and the team barrier (within one). Thread-safe; nothing allocates.
//
// Sleeping is lossless by the usual handshake: the waiter counts itself into `sleepers`, looks at
// the word again and lets the kernel compare it; the waker changes the word first and then looks at
// `sleepers`. Both orders are sequentially consistent. A counter that a dead process left nonzero
// costs later wakers one system call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "common/shm/layout.h"

namespace tandem::shm {

inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  asm volatile("yield" ::: "memory");
#endif
}

int64_t NowNs();  // steady
void YieldCpu();

// Wakes at most `count` sleepers of the 32-bit word.
void FutexWake(const uint32_t* word, int count);
// Sleeps while *word == expected, at most timeout_ns; may return early for no reason.
void FutexWait(const uint32_t* word, uint32_t expected, int64_t timeout_ns);

inline constexpr int kWakeAll = 0x7fffffff;

struct SpinPolicy {
  int64_t spin_ns = 0;  // 0: sleep at once
  bool yield = false;   // give the core away between looks: others may need it
};

// Calls ready() until it is true or the time is over; returns what it said last.
template <typename Ready>
bool SpinUntil(const SpinPolicy& policy, Ready&& ready) {
  if (ready()) return true;
  if (policy.spin_ns <= 0) return false;
  // A look costs a few ns while the line is ours, the clock 25: look at the clock every 64th time.
  const int64_t end_ns = NowNs() + policy.spin_ns;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      CpuRelax();
    }
    if (policy.yield) YieldCpu();
  } while (NowNs() < end_ns);
  return ready();
}

// One direction of a pair: a sequence word and the count of those asleep on it, both in the
// segment.
class Doorbell {
 public:
  template <typename WordLine>
  Doorbell(WordLine* word, Line* sleepers)
      : word_(&word->value), futex_(&word->word), sleepers_(&sleepers->value) {}

  uint64_t Read() const { return LoadAcquire(*word_); }

  // Publishes all that this thread has written before.
  void Ring(uint64_t sequence) const {
    std::atomic_ref<uint64_t>(*word_).exchange(sequence, std::memory_order_seq_cst);
    WakeSleepers();
  }

  // Makes sleepers look again, without a new sequence.
  void WakeSleepers() const {
    if (std::atomic_ref<uint64_t>(*sleepers_).load(std::memory_order_seq_cst) != 0) {
      FutexWake(futex_, kWakeAll);
    }
  }

  // Sleeps while the word is `seen`, until woken or timeout_ns.
  void Sleep(uint64_t seen, int64_t timeout_ns) const {
    std::atomic_ref<uint64_t> sleepers(*sleepers_);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (std::atomic_ref<uint64_t>(*word_).load(std::memory_order_seq_cst) == seen) {
      FutexWait(futex_, static_cast<uint32_t>(seen), timeout_ns);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  uint64_t* word_;
  const uint32_t* futex_;
  uint64_t* sleepers_;
};

inline Doorbell SubmitBell(PairLines* pair) {
  return Doorbell(&pair->submit_seq, &pair->submit_sleepers);
}
inline Doorbell DoneBell(PairLines* pair) {
  return Doorbell(&pair->done_seq, &pair->done_sleepers);
}

}  // namespace tandem::shm
