#pragma once

// A pinned pool of threads that execute one function together (SPMD): one fork and one join a step
// cost a fraction of a microsecond, because waiting threads spin on a word while work is expected
// and sleep on a futex only after `spin` without work.
//
//   Pool pool({.threads = 2});
//   pool.Run([&](int thread) { ...; pool.Barrier(); ... });
//
// The caller of Run is thread 0; it is pinned too if `pin_caller`. Run never allocates: the
// callable stays in the caller's frame. Barrier may be called inside Run only, by every thread
// equally often. Run is to be called by one thread at a time (always the same one when pinned); it
// does not nest.
//
// Waiting (between Runs, in Barrier, at the join): `spin` of busy waiting, then a futex. Where
// other threads need the same cores (co-located services) spin = 0 sleeps at once. A pool of one
// thread runs the function in the caller and never waits.
//
// Pinning: thread i runs on cpus[i]; an empty list means no pinning. A refused CPU (outside the
// cpuset) leaves that thread unpinned; pinned_threads() tells, the pool works all the same.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "common/shm/team_barrier.h"
#include "common/shm/waiting.h"

namespace tandem::expert {

class Pool {
 public:
  struct Options {
    int threads = 1;
    std::vector<int> cpus = {};
    bool pin_caller = false;
    // Longer than the gap between two layers of a step, far shorter than an idle second.
    std::chrono::microseconds spin{200};
  };

  // REQUIRES: threads >= 1; cpus empty or of `threads` entries.
  explicit Pool(const Options& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Threads that sit on the CPU they were given (the caller counts only with pin_caller).
  int pinned_threads() const { return pinned_.load(std::memory_order_relaxed); }

  // Calls fn(thread) on every thread, thread = 0 in the caller, and returns when all are done.
  template <typename Fn>
  void Run(Fn&& fn) {
    using Body = std::remove_reference_t<Fn>;
    RunErased([](void* context, int thread) { (*static_cast<Body*>(context))(thread); },
              const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
  }

  // Waits until every thread of the Run in progress has arrived. Orders memory like a lock.
  void Barrier() {
    if (threads_ > 1) barrier_.Wait(spin_);
  }

 private:
  using Function = void (*)(void* context, int thread);

  // What the caller tells the others: one cache line to write, one to read.
  struct alignas(128) Start {
    std::atomic<uint32_t> generation{0};
    std::atomic<uint32_t> sleepers{0};
    Function function = nullptr;
    void* context = nullptr;
  };
  // What they tell the caller: how often a thread has returned from a Run, over all Runs.
  struct alignas(128) Finish {
    std::atomic<uint32_t> returns{0};
    std::atomic<uint32_t> sleepers{0};
  };

  void RunErased(Function function, void* context);
  void Announce(uint32_t generation);
  void ThreadMain(int thread, int cpu);

  const int threads_;
  const shm::SpinPolicy spin_;
  Start start_;
  Finish finish_;
  shm::TeamBarrier barrier_;
  std::atomic<int> pinned_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace tandem::expert
