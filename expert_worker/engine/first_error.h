#pragma once

// The first error of work that many threads share; the others see that there is one and stop.

#include <atomic>
#include <mutex>

#include "absl/status/status.h"

namespace tandem::expert {

class FirstError {
 public:
  bool any() const { return any_.load(std::memory_order_relaxed); }
  // Any thread.
  void Set(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok()) status_ = status;
    any_.store(true, std::memory_order_relaxed);
  }
  // When all threads are done.
  absl::Status Take() const { return status_; }

 private:
  std::mutex mutex_;
  absl::Status status_;
  std::atomic<bool> any_{false};
};

}  // namespace tandem::expert
