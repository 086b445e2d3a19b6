// hot_experts_bench [--dilation N] [--steps N] [--machine NAME]: step times of described machines
// while hot experts move. Slots are filled from empty, so experts are copied in the background all
// the time; then the same traffic goes on with full slots. Printed are median and 99th percentile
// of both and of the same machine without hot experts, in wall time with the dilation taken out.
//
// Before that routing traces are replayed, the default number of copies in flight, two steps each:
// the hit rate beside that of the best fixed choice in hindsight, and the steps until it is within
// 5 % of that again after all layers' traffic has shifted.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "tests/bench/pipeline_run.h"
#include "tests/gpu_worker/hot_experts/routing_traces.h"
#include "tests/testing/shared_data.h"

namespace tandem::bench {
namespace {

struct HotScenario {
  const char* machine;
  const char* model;
  double budget_gb;
  int streams;
};

constexpr HotScenario kScenarios[] = {
    {"rtx4090-2s", "qwen3-30b-int4", 4, 1},
    {"rtx4090-2s", "qwen3-30b-int4", 4, 4},
    {"rtx5090-1s", "qwen3-235b-int4", 16, 1},
    {"h200-2s", "deepseek-v3-int4", 60, 4},
};

struct Options {
  double dilation = 20;
  int steps = 200;
  std::string machine;  // empty: all
};

double Percentile(std::vector<double> values, double share) {
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

void Print(const char* what, const std::vector<double>& step_us) {
  if (step_us.empty()) return;
  const double median = Percentile(step_us, 0.5);
  const double p99 = Percentile(step_us, 0.99);
  std::printf("  %-26s %4zu steps  median %9.1f us  p99 %9.1f us  p99/median %.3f\n", what,
              step_us.size(), median, p99, p99 / median);
}

// --- replays ---

constexpr uint64_t kSeed = 20261130;
constexpr int kMaxInFlight = gpu::ResidencyPlanner::Options{}.max_in_flight;
constexpr int kFillSteps = 300;     // slots are full by then: 768, four a step
constexpr int kReplaySteps = 1000;  // measured
// Under uniform traffic hindsight names the experts that were lucky: an eighth of 128, each picked
// m times, beat the mean by some 1.65 / sqrt(m), which is 4 % after so many rows of 8 picks.
constexpr int kUniformRows = 28'000;
constexpr int kShiftSteps = 200;  // before the shift, and until its rates are measured
constexpr int kWindowSteps = 50;  // that a hit rate is taken over

// The first step after `shift` from which on a window's hit rate is within 5 % of `best`.
int RecoverySteps(const gpu::Replay& replay, int shift, int end, double best) {
  for (int at = shift; at + kWindowSteps <= end; ++at) {
    if (replay.HitRate(at, at + kWindowSteps) >= 0.95 * best) return at - shift;
  }
  return -1;
}

void PrintReplay(const char* name, const gpu::RoutingTrace& trace, int shift) {
  const int slots = trace.shape.layers * trace.shape.experts / 8;
  gpu::Replay replay(trace.shape, {.slots = slots, .max_in_flight = kMaxInFlight});
  replay.Run(trace, 0, trace.steps);
  const int begin = shift == 0 ? kFillSteps : shift + kShiftSteps;
  const double best = gpu::BestFixedHitRate(trace, begin, trace.steps, replay.planner().capacity());
  const double rate = replay.HitRate(begin, trace.steps);
  std::printf("  %-30s hits %.3f  best fixed %.3f  share %.3f  moves a 100 steps %5.1f", name, rate,
              best, rate / best,
              100.0 * replay.Migrations(begin, trace.steps) / (trace.steps - begin));
  if (shift > 0) {
    std::printf("  recovered after %d steps", RecoverySteps(replay, shift, trace.steps, best));
  }
  std::printf("\n");
}

void PrintReplays(const gpu::TraceShape& shape) {
  const int end = kFillSteps + kReplaySteps;
  std::printf("%d layers of %d experts, %d of them a row, %d rows; slots for an eighth\n",
              shape.layers, shape.experts, shape.top_k, shape.rows);
  const auto same = [](int, int, int) { return 1.0; };
  PrintReplay("uniform", MakeTrace(shape, kFillSteps + kUniformRows / shape.rows, same, kSeed), 0);
  for (const double exponent : {0.7, 1.0, 1.5}) {
    const gpu::ZipfOrder order(shape, exponent, 2, kSeed);
    char name[64];
    std::snprintf(name, sizeof(name), "skewed, exponent %.1f", exponent);
    const auto still = [&](int, int layer, int e) { return order(0, layer, e); };
    PrintReplay(name, MakeTrace(shape, end, still, kSeed), 0);
    const int shift = kFillSteps + kShiftSteps;
    const auto shifts = [&](int step, int layer, int e) {
      return order(step < shift ? 0 : 1, layer, e);
    };
    std::snprintf(name, sizeof(name), "shift, exponent %.1f", exponent);
    PrintReplay(name, MakeTrace(shape, end + 2 * kShiftSteps, shifts, kSeed), shift);
  }
  const gpu::ZipfOrder order(shape, 1.2, 1, kSeed);
  const auto drifts = [&](int step, int layer, int e) {
    const int first = step / 100;
    const double part = step / 100.0 - first;
    return (1 - part) * order(0, layer, (e + first) % shape.experts) +
           part * order(0, layer, (e + first + 1) % shape.experts);
  };
  PrintReplay("drift, a rank in 100 steps", MakeTrace(shape, end, drifts, kSeed), 0);
}

void PrintAllReplays() {
  std::printf("replays with %d copies in flight\n", kMaxInFlight);
  for (const gpu::TraceShape& shape :
       {gpu::TraceShape{48, 128, 8, 1}, gpu::TraceShape{48, 128, 8, 4},
        gpu::TraceShape{24, 64, 8, 8}}) {
    PrintReplays(shape);
  }
  std::printf("recorded from the shipped model\n");
  const auto path = testing::SourceRoot() / "tests/data/routing/tandem_tiny.trace";
  PrintReplay("tandem-tiny", gpu::ReadTrace(path.string()), 0);
}

// --- step times ---

// Steps in which nothing was copied go to `resting`, the others to `copying`.
struct Samples {
  std::vector<double> copying_us;
  std::vector<double> resting_us;
  std::vector<double> all_us;      // in order
  std::vector<size_t> copying_at;  // of all_us
};

// While slots fill, steps get faster and faster: each copying step is compared with the median of
// the steps around it.
double P99OverMedian(const Samples& samples) {
  constexpr size_t kAround = 15;  // on each side
  std::vector<double> ratios;
  for (const size_t at : samples.copying_at) {
    const size_t begin = at < kAround ? 0 : at - kAround;
    const size_t end = std::min(samples.all_us.size(), at + kAround + 1);
    const auto first = samples.all_us.begin();
    const double median = Percentile(
        {first + static_cast<ptrdiff_t>(begin), first + static_cast<ptrdiff_t>(end)}, 0.5);
    ratios.push_back(samples.all_us[at] / median);
  }
  return Percentile(ratios, 0.99);
}

absl::Status Sample(PipelineRun& run, int steps, Samples* out) {
  const gpu::HotExperts* const hot = run.model().hot_experts();
  uint64_t migrations = hot == nullptr ? 0 : hot->counters().migrations;
  for (int i = 0; i < steps; ++i) {
    ASSIGN_OR_RETURN(const StepSample sample, run.Step());
    const uint64_t now = hot == nullptr ? 0 : hot->counters().migrations;
    (now != migrations ? out->copying_us : out->resting_us).push_back(sample.wall_us);
    if (now != migrations) out->copying_at.push_back(out->all_us.size());
    out->all_us.push_back(sample.wall_us);
    migrations = now;
  }
  return absl::OkStatus();
}

absl::Status Run(const HotScenario& hot, const PipelineModels& models, const Options& options) {
  Scenario scenario;
  scenario.machine = *gpu::FindSimMachine(hot.machine);
  scenario.model = *gpu::FindSimModel(hot.model);
  scenario.streams = hot.streams;
  scenario.context_tokens = 4096;
  ASSIGN_OR_RETURN(const std::string dir, models.DirOf(scenario.model));
  std::printf("%s on %s, %.0f GB of hot experts, %d streams\n", hot.model, hot.machine,
              hot.budget_gb, hot.streams);
  double without_us = 0;
  for (const double budget_gb : {0.0, hot.budget_gb}) {
    PolicyOptions policy;
    policy.hot_experts_bytes = static_cast<uint64_t>(budget_gb * 1e9);
    ASSIGN_OR_RETURN(const std::unique_ptr<PipelineRun> run,
                     PipelineRun::Create(scenario, policy, dir));
    run->SetWall(options.dilation);
    Samples samples;
    RETURN_IF_ERROR(Sample(*run, options.steps, &samples));
    Print(budget_gb > 0 ? "experts move" : "without hot experts",
          budget_gb > 0 ? samples.copying_us : samples.resting_us);
    if (budget_gb > 0) Print("at rest", samples.resting_us);
    if (budget_gb == 0) without_us = Percentile(samples.resting_us, 0.5);
    if (budget_gb == 0) continue;
    const gpu::PipelineCounters& counters = run->model().runner().pipeline().counters();
    const auto picks = static_cast<double>(counters.routed_rows) * run->model().spec().moe.top_k;
    if (!samples.copying_at.empty()) {
      std::printf("  while experts move, p99 over the median around it %.3f, without any %.3f\n",
                  P99OverMedian(samples), Percentile(samples.copying_us, 0.99) / without_us);
    }
    std::printf(
        "  %llu copies, %llu of %llu slots; hits %.3f of the picks\n",
        static_cast<unsigned long long>(run->model().hot_experts()->counters().migrations),
        static_cast<unsigned long long>(run->model().hot_experts()->counters().resident_experts),
        static_cast<unsigned long long>(run->model().hot_experts()->counters().slots),
        static_cast<double>(counters.resident_picks) / picks);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--dilation") options.dilation = std::atof(argv[i + 1]);
    if (name == "--machine") options.machine = argv[i + 1];
    if (name == "--steps") options.steps = std::atoi(argv[i + 1]);
  }
  const std::filesystem::path root = std::filesystem::temp_directory_path() / "tandem-hot-bench";
  std::filesystem::create_directories(root);
  if (options.machine.empty()) PrintAllReplays();
  const PipelineModels models(root.string());
  std::printf("wall time, dilated %.0f times\n", options.dilation);
  for (const HotScenario& scenario : kScenarios) {
    if (!options.machine.empty() && options.machine != scenario.machine) continue;
    const absl::Status status = Run(scenario, models, options);
    if (status.ok()) continue;
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) { return tandem::bench::Main(argc, argv); }
