// Proof of life for one process of a link, and the quickest sign of the other's death.
//
// A dedicated thread holds a robust futex word in the segment from construction to destruction.
// When the process dies, the kernel marks the word and wakes a sleeper before it frees any memory:
// 0.1 ms after SIGKILL, where sockets and pidfd follow only after the address space is gone (70 ms
// a GiB of 4-KiB pages). The same thread sleeps on the peer's word. The robust list is registered
// raw (set_robust_list) and its node is private memory: a pthread robust mutex would keep list
// pointers in the page that the peer can write.
//
// The callback runs once, on the life thread; it must not destroy the LifeLock. Other members: the
// owner's thread.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <functional>
#include <thread>

#include "common/shm/layout.h"

namespace tandem::shm {

class LifeLock {
 public:
  struct Options {
    Line* own = nullptr;
    Line* peer = nullptr;
    // Asked every 200 ms, for the signs that have no futex (socket, pidfd); may be empty.
    std::function<bool()> peer_gone;
    std::function<void()> on_peer_gone;
  };

  // Returns once the own word is held, or is found taken (held() is false then).
  explicit LifeLock(Options options);
  // Lets the own word go (to 0, which the peer reads as a clean end) and joins the thread.
  ~LifeLock();
  LifeLock(const LifeLock&) = delete;
  LifeLock& operator=(const LifeLock&) = delete;

  bool held() const { return state_.load(std::memory_order_acquire) != kFailed; }
  // Starts watching. REQUIRES: held(), and the peer holds its word by now.
  void Watch();

 private:
  enum State : uint32_t { kStarting, kHeld, kFailed, kWatching, kStopping };

  void ThreadMain();
  bool Acquire();
  void Release();
  void WatchPeer();
  void SetState(State state);

  const Options options_;
  robust_list node_{};
  robust_list_head head_{};
  std::atomic<uint32_t> state_{kStarting};
  std::thread thread_;
};

}  // namespace tandem::shm
