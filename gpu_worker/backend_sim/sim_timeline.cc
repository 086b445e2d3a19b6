#include "gpu_worker/backend_sim/sim_timeline.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/base/check.h"

namespace tandem::gpu {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;

constexpr SimResource kResources[] = {SimResource::kCompute, SimResource::kCopy,
                                      SimResource::kExperts};

int64_t MonotonicNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * kSecondNs + now.tv_nsec;
}

}  // namespace

SimTimeline::SimTimeline(const Options& options) : options_(options) {
  TANDEM_CHECK(options.dilation >= 1);
  origin_ns_ = MonotonicNs();
  if (options.mode == SimMode::kWall) StartThreads();
}

void SimTimeline::StartThreads() {
  for (const SimResource r : kResources) {
    if (!queue(r).thread.joinable()) queue(r).thread = std::thread([this, r] { ThreadMain(r); });
  }
}

void SimTimeline::Switch(const Options& options) {
  TANDEM_CHECK(options.dilation >= 1);
  for (const SimResource r : kResources) Drain(r);  // the streams first: they post to the experts
  const int64_t now_ns = NowNs();
  options_ = options;
  host_ns_ = now_ns;
  origin_ns_ = MonotonicNs() - static_cast<int64_t>(static_cast<double>(now_ns) * options.dilation);
  if (options.mode == SimMode::kWall) StartThreads();
}

SimTimeline::~SimTimeline() {
  // The streams first: they post to the experts.
  for (Queue& q : queues_) {
    if (!q.thread.joinable()) continue;
    {
      const std::lock_guard lock(q.mutex);
      q.stop = true;
    }
    q.changed.notify_all();
    q.thread.join();
  }
}

int64_t SimTimeline::NowNs() const {
  if (options_.mode == SimMode::kVirtual) return host_ns_.load();
  return static_cast<int64_t>(static_cast<double>(MonotonicNs() - origin_ns_) / options_.dilation);
}

void SimTimeline::AdvanceHostNs(int64_t duration_ns) {
  TANDEM_CHECK(options_.mode == SimMode::kVirtual && duration_ns >= 0);
  host_ns_ += duration_ns;
}

void SimTimeline::SleepUntil(int64_t time_ns) const {
  const int64_t at =
      origin_ns_ + static_cast<int64_t>(static_cast<double>(time_ns) * options_.dilation);
  const timespec deadline{.tv_sec = at / kSecondNs, .tv_nsec = at % kSecondNs};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
  }
}

void SimTimeline::PostAt(SimResource resource, int64_t not_before_ns, Op op) {
  Item item{not_before_ns, std::move(op)};
  if (options_.mode == SimMode::kVirtual) return Execute(resource, item);
  Queue& q = queue(resource);
  {
    const std::lock_guard lock(q.mutex);
    q.items.push_back(std::move(item));
    ++q.posted;
  }
  q.changed.notify_all();
}

void SimTimeline::Execute(SimResource resource, const Item& item) {
  AdvanceTo(resource, item.not_before_ns);
  item.op();
}

void SimTimeline::ThreadMain(SimResource resource) {
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);  // sleeps end on time, not within 50 us of it
  Queue& q = queue(resource);
  std::unique_lock lock(q.mutex);
  while (true) {
    q.changed.wait(lock, [&] { return q.stop || !q.items.empty(); });
    if (q.items.empty()) return;
    const Item item = std::move(q.items.front());
    q.items.pop_front();
    const bool last = q.items.empty();
    lock.unlock();
    Execute(resource, item);
    if (last) Pace(resource);
    lock.lock();
    ++q.finished;
    if (q.items.empty()) q.changed.notify_all();
  }
}

void SimTimeline::Drain(SimResource resource) {
  Queue& q = queue(resource);
  if (options_.mode == SimMode::kVirtual) {
    host_ns_ = std::max(host_ns_.load(), q.now_ns.load());
    return;
  }
  std::unique_lock lock(q.mutex);
  q.changed.wait(lock, [&] { return q.finished == q.posted; });
}

void SimTimeline::Advance(SimResource resource, int64_t duration_ns) {
  queue(resource).now_ns += duration_ns;
  queue(resource).busy_ns += duration_ns;
}

void SimTimeline::AdvanceTo(SimResource resource, int64_t time_ns) {
  Queue& q = queue(resource);
  q.now_ns = std::max(q.now_ns.load(), time_ns);
}

void SimTimeline::Pace(SimResource resource) {
  if (options_.mode == SimMode::kWall) SleepUntil(TimeNs(resource));
}

void SimTimeline::RecordEvent(SimResource resource, int event) {
  TANDEM_CHECK(event >= 0 && event < kMaxEvents);
  Event& e = events_[static_cast<size_t>(event)];
  const uint64_t record = ++e.posted;
  Post(resource, [this, &e, resource, record] {
    Pace(resource);
    const std::lock_guard lock(e.mutex);
    e.times_ns[record % e.times_ns.size()] = TimeNs(resource);
    e.done = record;
    e.changed.notify_all();
  });
}

void SimTimeline::WaitEvent(SimResource resource, int event) {
  TANDEM_CHECK(event >= 0 && event < kMaxEvents);
  Event& e = events_[static_cast<size_t>(event)];
  const uint64_t record = e.posted;
  if (record == 0) return;
  Post(resource, [this, &e, resource, record] {
    std::unique_lock lock(e.mutex);
    e.changed.wait(lock, [&] { return e.done >= record; });
    AdvanceTo(resource, e.times_ns[record % e.times_ns.size()]);
  });
}

}  // namespace tandem::gpu
