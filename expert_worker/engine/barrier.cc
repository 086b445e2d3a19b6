#include "expert_worker/engine/barrier.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace tandem::expert {
namespace {

// Pauses between two looks at the clock: about a microsecond.
constexpr int kPausesPerClockRead = 32;

uint32_t* FutexAddress(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// Sequentially consistent on both sides: either the publisher sees the sleeper, or the sleeper (and
// the kernel's own comparison) sees the new value.
void WaitWord::Publish(uint32_t value) {
  value_.store(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, FutexAddress(value_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void WaitWord::WaitWhileEqual(uint32_t old, int64_t spin_ns) {
  if (value_.load(std::memory_order_acquire) != old) return;
  if (spin_ns > 0) {
    const int64_t deadline_ns = NowNs() + spin_ns;
    do {
      for (int i = 0; i < kPausesPerClockRead; ++i) {
        if (value_.load(std::memory_order_acquire) != old) return;
        _mm_pause();
      }
    } while (NowNs() < deadline_ns);
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == old) {
    syscall(SYS_futex, FutexAddress(value_), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Barrier::Wait() {
  if (threads_ == 1) return;
  const uint32_t generation = generation_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.Publish(generation + 1);
  } else {
    generation_.WaitWhileEqual(generation, spin_ns_);
  }
}

}  // namespace tandem::expert
