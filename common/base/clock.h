#pragma once

// Time as a seam: code that waits or measures takes a Clock, tests pass a FakeClock.
// Thread-safe. Monotonic, in nanoseconds since an arbitrary origin.

#include <atomic>
#include <cstdint>

namespace tandem {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t NowNs() const = 0;
};

// CLOCK_MONOTONIC.
class SteadyClock final : public Clock {
 public:
  int64_t NowNs() const override;
};

// Moves only when told to.
class FakeClock final : public Clock {
 public:
  int64_t NowNs() const override { return now_ns_.load(std::memory_order_acquire); }
  void AdvanceNs(int64_t delta_ns) { now_ns_.fetch_add(delta_ns, std::memory_order_acq_rel); }

 private:
  std::atomic<int64_t> now_ns_{0};
};

}  // namespace tandem
