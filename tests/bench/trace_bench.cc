// What a span of the timeline costs its thread: off (goal: a load and a branch) and on (goal: under
// 100 ns, so that a layer's ten spans take 1 us). The reader drains as it does in a server, here on
// the measured thread but outside of the measured time.

#include <benchmark/benchmark.h>

#include "common/base/trace.h"

namespace tandem {
namespace {

constexpr TraceKind kWork = {.name = "work", .args = {"number"}};
constexpr int kSpans = 1000;

void BM_Nothing(benchmark::State& state) {
  for (auto _ : state) {
    for (int64_t i = 0; i < kSpans; ++i) benchmark::DoNotOptimize(i);
  }
  state.SetItemsProcessed(state.iterations() * kSpans);
}
BENCHMARK(BM_Nothing);

void BM_SpanOff(benchmark::State& state) {
  Tracer tracer;
  TraceTrack* const track = tracer.AddTrack("thread");
  for (auto _ : state) {
    for (int64_t i = 0; i < kSpans; ++i) {
      const TraceSpan span(*track, kWork, {i});
      benchmark::DoNotOptimize(i);
    }
  }
  state.SetItemsProcessed(state.iterations() * kSpans);
}
BENCHMARK(BM_SpanOff);

class Recorded {
 public:
  Recorded() : track_(tracer_.AddTrack("thread")) {}

  template <typename Body>
  void Run(benchmark::State& state, Body body) {
    for (auto _ : state) {
      state.PauseTiming();
      tracer_.Start().IgnoreError();
      state.ResumeTiming();
      for (int64_t i = 0; i < kSpans; ++i) body(*track_, i);
      state.PauseTiming();
      const TraceLog log = tracer_.Stop();
      if (log.tracks[0].events.size() != kSpans) state.SkipWithError("events are missing");
      state.ResumeTiming();
    }
    state.SetItemsProcessed(state.iterations() * kSpans);
  }

 private:
  Tracer tracer_;
  TraceTrack* const track_;
};

void BM_SpanOn(benchmark::State& state) {
  Recorded().Run(state, [](TraceTrack& track, int64_t i) {
    const TraceSpan span(track, kWork, {i});
    benchmark::DoNotOptimize(i);
  });
}
BENCHMARK(BM_SpanOn);

// Where the times come from a device.
void BM_AddOn(benchmark::State& state) {
  const int64_t now_ns = TraceNowNs() + int64_t{3600} * 1'000'000'000;
  Recorded().Run(
      state, [now_ns](TraceTrack& track, int64_t i) { track.Add(kWork, now_ns, now_ns + i, {i}); });
}
BENCHMARK(BM_AddOn);

}  // namespace
}  // namespace tandem

BENCHMARK_MAIN();
