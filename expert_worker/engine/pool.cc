#include "expert_worker/engine/pool.h"

#include <pthread.h>

#include <string>

#include "common/base/check.h"
#include "common/hw/topology.h"

namespace tandem::expert {
namespace {

constexpr int64_t kHourNs = int64_t{3600} * 1000000000;

const uint32_t* Futex(const std::atomic<uint32_t>& word) {
  static_assert(sizeof(word) == sizeof(uint32_t));
  return reinterpret_cast<const uint32_t*>(&word);
}

// Returns when the word is `wanted`; sleeping is counted in `sleepers`.
void WaitUntil(const shm::SpinPolicy& spin, const std::atomic<uint32_t>& word,
               std::atomic<uint32_t>& sleepers, uint32_t wanted) {
  const auto ready = [&] { return word.load(std::memory_order_acquire) == wanted; };
  if (shm::SpinUntil(spin, ready)) return;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (true) {
    const uint32_t now = word.load(std::memory_order_seq_cst);
    if (now == wanted) break;
    shm::FutexWait(Futex(word), now, kHourNs);
  }
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

Pool::Pool(const Options& options)
    : threads_(options.threads),
      spin_{std::chrono::duration_cast<std::chrono::nanoseconds>(options.spin).count()},
      barrier_(options.threads) {
  TANDEM_CHECK(threads_ >= 1);
  TANDEM_CHECK(options.cpus.empty() || options.cpus.size() == static_cast<size_t>(threads_));
  const bool pin = !options.cpus.empty();
  if (pin && options.pin_caller && PinThisThread(options.cpus[0]).ok()) pinned_.fetch_add(1);
  workers_.reserve(static_cast<size_t>(threads_ - 1));
  for (int i = 1; i < threads_; ++i) {
    workers_.emplace_back([this, i, cpu = pin ? options.cpus[i] : -1] { ThreadMain(i, cpu); });
  }
  // All threads have been pinned, or refused, when the constructor returns.
  Run([](int) {});
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_relaxed);
  Announce(start_.generation.load(std::memory_order_relaxed) + 1);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::RunErased(Function function, void* context) {
  if (threads_ == 1) {
    function(context, 0);
    return;
  }
  start_.function = function;
  start_.context = context;
  const uint32_t generation = start_.generation.load(std::memory_order_relaxed) + 1;
  Announce(generation);
  function(context, 0);
  WaitUntil(spin_, finish_.returns, finish_.sleepers,
            generation * static_cast<uint32_t>(threads_ - 1));
}

// Waking is lossless because both sides are sequentially consistent: either the waker sees the
// sleeper, or the sleeper (and the kernel's own comparison) sees the new value.
void Pool::Announce(uint32_t generation) {
  start_.generation.store(generation, std::memory_order_seq_cst);
  if (start_.sleepers.load(std::memory_order_seq_cst) != 0) {
    shm::FutexWake(Futex(start_.generation), shm::kWakeAll);
  }
}

void Pool::ThreadMain(int thread, int cpu) {
  pthread_setname_np(pthread_self(), ("pool-" + std::to_string(thread)).c_str());
  if (cpu >= 0 && PinThisThread(cpu).ok()) pinned_.fetch_add(1);
  for (uint32_t generation = 1;; ++generation) {
    WaitUntil(spin_, start_.generation, start_.sleepers, generation);
    if (stop_.load(std::memory_order_relaxed)) return;
    start_.function(start_.context, thread);
    const uint32_t returns = finish_.returns.fetch_add(1, std::memory_order_seq_cst) + 1;
    if (returns == generation * static_cast<uint32_t>(threads_ - 1) &&
        finish_.sleepers.load(std::memory_order_seq_cst) != 0) {
      shm::FutexWake(Futex(finish_.returns), shm::kWakeAll);
    }
  }
}

}  // namespace tandem::expert
