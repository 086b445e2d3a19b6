#pragma once

// Time of a simulated machine: what each of its resources (the device's two streams, the experts'
// team of cores) is doing until when. Work is posted to a resource and executes in order; while it
// executes it moves the resource's time by what it costs.
//
//   virtual: work executes as it is posted, in the poster's thread; time moves by costs alone, so
//            equal work gives equal times. The host's own work takes no time.
//   wall:    each resource is a thread that executes and then sleeps until its time has come, so no
//            core is busy while an op "runs". Time is stretched by `dilation`, against the jitter
//            of timers, and to leave room for computing the small tensors.
//
// Times are nanoseconds of the machine, undilated in both modes, from an origin at construction. An
// op starts at the latest of its resource's time, what it waits for, and its posting. In wall mode
// these are the times that were meant, not those at which a thread woke up: late wake-ups do not
// add up, they are caught up where the resource would have slept.
//
// This is a device for tests and benches: posting allocates and locks.
//
// Thread safety: as each method says. Errors: none.

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "common/base/clock.h"

namespace tandem::gpu {

enum class SimMode : uint8_t { kVirtual, kWall };
enum class SimResource : uint8_t { kCompute, kCopy, kExperts };

class SimTimeline final : public Clock {
 public:
  struct Options {
    SimMode mode = SimMode::kVirtual;
    double dilation = 1;  // of wall mode
  };
  static constexpr int kMaxEvents = 64;

  explicit SimTimeline(const Options& options);
  // Waits for all that was posted.
  ~SimTimeline() override;

  const Options& options() const { return options_; }
  // Waits for all that was posted, then goes on from the same time in the other mode. Host thread.
  void Switch(const Options& options);
  // The host's time: in virtual mode that of its last Drain. Any thread.
  int64_t NowNs() const override;
  // The host is busy with something else. REQUIRES: virtual mode.
  void AdvanceHostNs(int64_t duration_ns);

  // From any thread, one at a time for each resource. `op` starts no earlier than now, or than
  // `not_before_ns`.
  using Op = std::function<void()>;
  void Post(SimResource resource, Op op) { PostAt(resource, NowNs(), std::move(op)); }
  void PostAt(SimResource resource, int64_t not_before_ns, Op op);
  // The host waits until all that was posted is done and its time has come.
  void Drain(SimResource resource);

  // Order between resources, as of CUDA streams: waits for the last record posted before the wait.
  // Host thread. REQUIRES: 0 <= event < kMaxEvents.
  void RecordEvent(SimResource resource, int event);
  void WaitEvent(SimResource resource, int event);

  // For ops, on the resource that they execute on.
  void Advance(SimResource resource, int64_t duration_ns);  // busy
  void AdvanceTo(SimResource resource, int64_t time_ns);    // idle
  // Wall mode: sleeps until the resource's time has come. What others may see of an op (a
  // submission, a reply) is shown after this.
  void Pace(SimResource resource);
  // A thread that is none of the resources: wall mode sleeps until then, virtual mode does not
  // wait.
  void PaceThread(int64_t time_ns) const {
    if (options_.mode == SimMode::kWall) SleepUntil(time_ns);
  }
  // Any thread.
  int64_t TimeNs(SimResource resource) const { return queue(resource).now_ns.load(); }
  int64_t BusyNs(SimResource resource) const { return queue(resource).busy_ns.load(); }

 private:
  struct Item {
    int64_t not_before_ns = 0;
    Op op;
  };
  struct Queue {
    std::atomic<int64_t> now_ns{0};  // moved by the executing thread alone
    std::atomic<int64_t> busy_ns{0};
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> items;
    uint64_t posted = 0;
    uint64_t finished = 0;
    bool stop = false;
    std::thread thread;
  };
  struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t posted = 0;  // records; host thread
    uint64_t done = 0;
    std::array<int64_t, 16> times_ns{};  // of the last records, by record modulo size
  };

  Queue& queue(SimResource r) { return queues_[static_cast<size_t>(r)]; }
  const Queue& queue(SimResource r) const { return queues_[static_cast<size_t>(r)]; }
  void StartThreads();
  void Execute(SimResource resource, const Item& item);
  void ThreadMain(SimResource resource);
  void SleepUntil(int64_t time_ns) const;

  Options options_;                  // changed while nothing executes
  int64_t origin_ns_ = 0;            // CLOCK_MONOTONIC, of wall mode
  std::atomic<int64_t> host_ns_{0};  // virtual mode
  std::array<Queue, 3> queues_;
  std::array<Event, kMaxEvents> events_;
};

}  // namespace tandem::gpu
