// hot_experts_bench [--dilation N] [--steps N]: step times of described machines while hot experts
// move. Slots are filled from empty, so experts are copied in the background all the time; then the
// same traffic goes on with full slots. Printed are median and 99th percentile of both and of the
// same machine without hot experts, in wall time with the dilation taken out.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "tests/bench/pipeline_run.h"

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

// Steps in which nothing was copied go to `resting`, the others to `copying`.
struct Samples {
  std::vector<double> copying_us;
  std::vector<double> resting_us;
};

absl::Status Sample(PipelineRun& run, int steps, Samples* out) {
  const gpu::HotExperts* const hot = run.model().hot_experts();
  uint64_t migrations = hot == nullptr ? 0 : hot->counters().migrations;
  for (int i = 0; i < steps; ++i) {
    ASSIGN_OR_RETURN(const StepSample sample, run.Step());
    const uint64_t now = hot == nullptr ? 0 : hot->counters().migrations;
    (now != migrations ? out->copying_us : out->resting_us).push_back(sample.wall_us);
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
    if (budget_gb == 0) continue;
    const gpu::PipelineCounters& counters = run->model().runner().pipeline().counters();
    const auto picks = static_cast<double>(counters.routed_rows) * run->model().spec().moe.top_k;
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
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--dilation") options.dilation = std::atof(argv[i + 1]);
    if (name == "--steps") options.steps = std::atoi(argv[i + 1]);
  }
  const std::filesystem::path root = std::filesystem::temp_directory_path() / "tandem-hot-bench";
  std::filesystem::create_directories(root);
  const PipelineModels models(root.string());
  std::printf("wall time, dilated %.0f times\n", options.dilation);
  for (const HotScenario& scenario : kScenarios) {
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
