// Fork and join of the pinned pool (goal: <= 0.5 us with two threads), and its barrier.
// "spin" threads stay awake between runs; "sleep" threads pay a futex wake-up each time.

#include <benchmark/benchmark.h>

#include <chrono>

#include "common/hw/topology.h"
#include "expert_worker/engine/pool.h"

namespace tandem::expert {
namespace {

Pool::Options PinnedOptions(int threads, int spin_us) {
  Pool::Options options;
  options.threads = threads;
  options.spin = std::chrono::microseconds(spin_us);
  static const std::vector<int> cpus = AllowedCpus();  // before the first pool pins this thread
  if (static_cast<size_t>(threads) <= cpus.size()) {
    options.cpus.assign(cpus.begin(), cpus.begin() + threads);
    options.pin_caller = true;
  }
  return options;
}

void BM_ForkJoin(benchmark::State& state, int spin_us) {
  Pool pool(PinnedOptions(static_cast<int>(state.range(0)), spin_us));
  int64_t calls = 0;
  for (auto _ : state) {
    pool.Run([&](int thread) {
      if (thread == 0) ++calls;
    });
  }
  benchmark::DoNotOptimize(calls);
  state.counters["pinned"] = pool.pinned_threads();
}
BENCHMARK_CAPTURE(BM_ForkJoin, spin, 1000)->Arg(1)->Arg(2)->UseRealTime();
BENCHMARK_CAPTURE(BM_ForkJoin, sleep, 0)->Arg(2)->UseRealTime();

void BM_Barrier(benchmark::State& state) {
  constexpr int kBarriers = 1000;
  Pool pool(PinnedOptions(static_cast<int>(state.range(0)), 1000));
  for (auto _ : state) {
    pool.Run([&](int) {
      for (int i = 0; i < kBarriers; ++i) pool.Barrier();
    });
  }
  state.SetItemsProcessed(state.iterations() * kBarriers);
}
BENCHMARK(BM_Barrier)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace tandem::expert

BENCHMARK_MAIN();
