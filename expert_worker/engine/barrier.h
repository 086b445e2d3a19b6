#pragma once

// Waiting of threads for each other by spinning first and sleeping on a futex after: WaitWord is
// one word that is waited on, Barrier lets a fixed number of threads meet.
//
// Thread-safe as described; no allocation after construction. A spin of 0 sleeps at once, which is
// right where the threads waited for need this core.

#include <atomic>
#include <cstdint>

namespace tandem::expert {

// Alone on two cache lines (adjacent-line prefetch).
class alignas(128) WaitWord {
 public:
  uint32_t value() const { return value_.load(std::memory_order_relaxed); }
  // Stores and wakes every waiter. Whatever was written before is visible to them.
  void Publish(uint32_t value);
  // Returns when the word differs from `old`.
  void WaitWhileEqual(uint32_t old, int64_t spin_ns);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Barrier {
 public:
  // REQUIRES: threads >= 1.
  Barrier(int threads, int64_t spin_ns) : threads_(threads), spin_ns_(spin_ns) {}
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;

  // Returns when all threads have called it. Orders memory like a lock. Reusable at once.
  void Wait();

 private:
  const int threads_;
  const int64_t spin_ns_;
  WaitWord generation_;
  alignas(128) std::atomic<int> arrived_{0};
};

}  // namespace tandem::expert
