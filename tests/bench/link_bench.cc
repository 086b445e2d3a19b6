// What the expert link costs without its payload: doorbells, header, checks and answer of a
// submission of zero rows.
//
// Apart: one gpu thread and one expert thread on two CPUs, spinning; round trip, and the wake-ahead
// after idle. Co-located: both threads on one CPU, each round trip two hand-overs of the core;
// beside it, in the same run, a plain futex ping-pong of two threads on that CPU. Medians and tails
// are over single round trips.
//
// Run: link_bench [--benchmark_filter=...]; needs two CPUs for "apart".

#include <benchmark/benchmark.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/shm/waiting.h"
#include "expert_worker/link_loop.h"
#include "gpu_worker/links/shm_expert_link.h"

namespace tandem {
namespace {

using shm::Placement;

class NoExperts final : public shm::BatchHandler {
 public:
  absl::Status Configure(const shm::BatchLimits&) override { return absl::OkStatus(); }
  void Run(const shm::ExpertBatch&, int, int) override {}
};

void Pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

std::vector<int> QueryCpus() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof(set), &set);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// As they were at the start: pinning narrows what the thread sees later.
const std::vector<int>& AllowedCpus() {
  static const std::vector<int> cpus = QueryCpus();
  return cpus;
}

// Keeps single times, reports their quantiles as counters in microseconds.
class Quantiles {
 public:
  Quantiles() { times_ns_.reserve(1 << 22); }
  void Add(int64_t ns) {
    if (times_ns_.size() < times_ns_.capacity()) times_ns_.push_back(ns);
  }
  void Report(benchmark::State* state) {
    if (times_ns_.empty()) return;
    std::sort(times_ns_.begin(), times_ns_.end());
    const auto at = [&](double q) {
      return static_cast<double>(
                 times_ns_[static_cast<size_t>(q * static_cast<double>(times_ns_.size() - 1))]) /
             1000.0;
    };
    state->counters["p50_us"] = at(0.5);
    state->counters["p99_us"] = at(0.99);
    state->counters["p999_us"] = at(0.999);
  }

 private:
  std::vector<int64_t> times_ns_;
};

// A link with its expert worker in a thread of this process, each side on its CPU.
class Bench {
 public:
  Bench(Placement placement, int gpu_cpu, int expert_cpu) {
    char name[] = "/tmp/tandem-bench-XXXXXX";
    TANDEM_CHECK(mkdtemp(name) != nullptr);
    dir_ = name;
    expert::LinkLoop::Options options;
    options.socket_path = dir_ + "/link";
    options.thread_cpus = {expert_cpu};
    options.placement = placement;
    loop_ = expert::LinkLoop::Start(options, &handler_).value();
    thread_ = std::thread([this, expert_cpu] {
      Pin(expert_cpu);
      loop_->RunThread(0);
    });
    const shm::BatchLimits limits{.max_rows = 16,
                                  .hidden = 2048,
                                  .top_k = 8,
                                  .num_experts = 128,
                                  .num_layers = 48,
                                  .lanes = 1,
                                  .row_type = shm::RowType::kBf16};
    gpu::ShmLinkOptions link;
    link.ticket = loop_->Offer({.limits = limits, .model_hash = 1}).value();
    link.model_hash = 1;
    link.limits = limits;
    link.thread_cpus = {gpu_cpu};
    link_ = gpu::AttachShmExpertLink(link).value();
    Pin(gpu_cpu);
  }
  ~Bench() {
    link_.reset();
    loop_->Stop();
    thread_.join();
    std::filesystem::remove_all(dir_);
  }

  void RoundTrip(int32_t rows, const float* x, float* out) {
    const std::vector<uint16_t>& ids = ids_;
    link_->Submit({.lane = 0,
                   .layer = 0,
                   .flags = 0,
                   .rows = &rows,
                   .max_rows = 16,
                   .x = x,
                   .ids = ids.data(),
                   .weights = weights_.data(),
                   .deferred = nullptr},
                  0, 1);
    link_->Wait({.lane = 0,
                 .layer = 0,
                 .rows = &rows,
                 .max_rows = 16,
                 .out = out,
                 .gather = gpu::Gather::kStore},
                0, 1);
  }

  gpu::ExpertLink& link() { return *link_; }

 private:
  std::string dir_;
  NoExperts handler_;
  std::unique_ptr<expert::LinkLoop> loop_;
  std::thread thread_;
  std::unique_ptr<gpu::ExpertLink> link_;
  const std::vector<uint16_t> ids_ = std::vector<uint16_t>(16 * 8, 1);
  const std::vector<float> weights_ = std::vector<float>(16 * 8, 0.1f);
};

void RoundTrips(benchmark::State& state, Placement placement, size_t expert_cpu_index,
                int32_t rows) {
  const std::vector<int> cpus = AllowedCpus();
  if (cpus.size() <= expert_cpu_index) {
    state.SkipWithError("not enough CPUs");
    return;
  }
  Bench bench(placement, cpus[0], cpus[expert_cpu_index]);
  const std::vector<float> x(16 * 2048, 0.5f);
  std::vector<float> out(16 * 2048);
  Quantiles quantiles;
  bench.link().BeginStep(1);
  for (int i = 0; i < 1000; ++i) bench.RoundTrip(rows, x.data(), out.data());
  for (auto _ : state) {
    const int64_t start_ns = shm::NowNs();
    bench.RoundTrip(rows, x.data(), out.data());
    quantiles.Add(shm::NowNs() - start_ns);
  }
  if (!bench.link().EndStep().ok()) state.SkipWithError("the link failed");
  quantiles.Report(&state);
}

void BM_ApartEmpty(benchmark::State& state) { RoundTrips(state, Placement::kApart, 1, 0); }
void BM_ApartOneRow(benchmark::State& state) { RoundTrips(state, Placement::kApart, 1, 1); }
void BM_ColocatedEmpty(benchmark::State& state) { RoundTrips(state, Placement::kColocated, 0, 0); }
void BM_ColocatedOneRow(benchmark::State& state) { RoundTrips(state, Placement::kColocated, 0, 1); }

// Two threads on one CPU, each sleeping until the other has set its word: the least that a
// hand-over of a core costs.
void BM_PlainFutexSameCpu(benchmark::State& state) {
  const int cpu = AllowedCpus()[0];
  alignas(128) static std::atomic<uint32_t> ping{0};
  alignas(128) static std::atomic<uint32_t> pong{0};
  static std::atomic<bool> stop{false};
  ping = 0;
  pong = 0;
  stop = false;
  const auto word = [](std::atomic<uint32_t>& value) {
    return reinterpret_cast<const uint32_t*>(&value);
  };
  std::thread partner([&] {
    Pin(cpu);
    for (uint32_t seen = 0; !stop.load();) {
      shm::FutexWait(word(ping), seen, 1'000'000'000);
      if (ping.load() == seen) continue;
      seen = ping.load();
      pong.store(seen);
      shm::FutexWake(word(pong), 1);
    }
  });
  Pin(cpu);
  Quantiles quantiles;
  uint32_t round = 0;
  for (auto _ : state) {
    const int64_t start_ns = shm::NowNs();
    ping.store(++round);
    shm::FutexWake(word(ping), 1);
    while (pong.load() != round) shm::FutexWait(word(pong), round - 1, 1'000'000'000);
    quantiles.Add(shm::NowNs() - start_ns);
  }
  stop = true;
  ping.store(round + 1);
  shm::FutexWake(word(ping), 1);
  partner.join();
  quantiles.Report(&state);
}

// The bare minimum across CPUs: two words, two spinning threads.
void BM_PlainSpinTwoCpus(benchmark::State& state) {
  const std::vector<int> cpus = AllowedCpus();
  if (cpus.size() < 2) {
    state.SkipWithError("not enough CPUs");
    return;
  }
  alignas(128) static std::atomic<uint64_t> ping{0};
  alignas(128) static std::atomic<uint64_t> pong{0};
  ping = 0;
  pong = 0;
  constexpr uint64_t kStop = ~uint64_t{0};
  std::atomic<bool> ready{false};
  std::thread partner([&] {
    Pin(cpus[1]);
    ready = true;
    for (uint64_t seen = 0; seen != kStop;) {
      const uint64_t now = ping.load(std::memory_order_acquire);
      if (now != seen)
        pong.store(seen = now, std::memory_order_release);
      else
        shm::CpuRelax();
    }
  });
  while (!ready) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Pin(cpus[0]);
  Quantiles quantiles;
  uint64_t round = 0;
  for (auto _ : state) {
    const int64_t start_ns = shm::NowNs();
    ping.store(++round, std::memory_order_release);
    while (pong.load(std::memory_order_acquire) != round) shm::CpuRelax();
    quantiles.Add(shm::NowNs() - start_ns);
  }
  ping.store(kStop);
  partner.join();
  quantiles.Report(&state);
}

BENCHMARK(BM_PlainSpinTwoCpus)->UseRealTime();
BENCHMARK(BM_ApartEmpty)->UseRealTime();
BENCHMARK(BM_ApartOneRow)->UseRealTime();
BENCHMARK(BM_PlainFutexSameCpu)->UseRealTime();
BENCHMARK(BM_ColocatedEmpty)->UseRealTime();
BENCHMARK(BM_ColocatedOneRow)->UseRealTime();

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  tandem::InitLogging("link_bench", "error");
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
