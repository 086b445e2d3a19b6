#include "expert_worker/engine/pool.h"

#include <pthread.h>

#include <string>

#include "common/base/check.h"
#include "common/hw/topology.h"

namespace tandem::expert {

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
  Publish(start_, start_.value.load(std::memory_order_relaxed) + 1);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::RunErased(Function function, void* context) {
  if (threads_ == 1) {
    function(context, 0);
    return;
  }
  function_ = function;
  context_ = context;
  running_.store(threads_ - 1, std::memory_order_relaxed);
  const uint32_t before = start_.value.load(std::memory_order_relaxed);
  Publish(start_, before + 1);
  function(context, 0);
  WaitWhileEqual(finish_, before);
}

void Pool::ThreadMain(int thread, int cpu) {
  pthread_setname_np(pthread_self(), ("pool-" + std::to_string(thread)).c_str());
  if (cpu >= 0 && PinThisThread(cpu).ok()) pinned_.fetch_add(1);
  uint32_t seen = 0;
  while (true) {
    WaitWhileEqual(start_, seen);
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    function_(context_, thread);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) Publish(finish_, seen);
  }
}

// Sequentially consistent on both sides: either the publisher sees the sleeper, or the sleeper (and
// the kernel's own comparison) sees the new value.
void Pool::Publish(Word& word, uint32_t value) {
  word.value.store(value, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) == 0) return;
  shm::FutexWake(reinterpret_cast<const uint32_t*>(&word.value), shm::kWakeAll);
}

void Pool::WaitWhileEqual(Word& word, uint32_t old) const {
  const auto changed = [&] { return word.value.load(std::memory_order_acquire) != old; };
  if (shm::SpinUntil(spin_, changed)) return;
  constexpr int64_t kHourNs = int64_t{3600} * 1000000000;
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.value.load(std::memory_order_seq_cst) == old) {
    shm::FutexWait(reinterpret_cast<const uint32_t*>(&word.value), old, kHourNs);
  }
  word.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace tandem::expert
