// prefill_stream_bench [--rows N]: prefill steps of described machines with streamed experts, in
// virtual time: without streaming, with the best fixed split found by search, and with the
// planner's, each plain and as lanes.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "common/base/status.h"
#include "tests/bench/pipeline_run.h"

namespace tandem::bench {
namespace {

constexpr int kLayers = 4;         // layers of a large model are alike
constexpr int kSettledSteps = 50;  // of the planner
constexpr int kSearchSteps = 16;

struct Bench {
  Scenario scenario;
  PipelinePolicy policy = PipelinePolicy::kPlain;
  std::string dir;
};

absl::StatusOr<double> StepUs(const Bench& bench, int fixed, int steps) {
  PolicyOptions policy;
  policy.policy = bench.policy;
  policy.hot_experts_bytes = uint64_t{1} << 40;  // no split is short of slots
  policy.residents = false;
  policy.stream_prompts = true;
  policy.fixed_streamed = fixed;
  ASSIGN_OR_RETURN(const std::unique_ptr<PipelineRun> run,
                   PipelineRun::Create(bench.scenario, policy, bench.dir));
  double us = 0;
  for (int i = 0; i < steps; ++i) {
    ASSIGN_OR_RETURN(const StepSample sample, run->Step());
    us = sample.virtual_us;
  }
  return us;
}

absl::Status Run(const Bench& bench, int experts) {
  // The first step knows neither busy experts nor a balanced cut of the lanes.
  constexpr int kSteps = 4;
  ASSIGN_OR_RETURN(const double without, StepUs(bench, 0, kSteps));
  double best = without;
  int best_k = 0;
  for (int k = experts / kSearchSteps; k <= experts; k += experts / kSearchSteps) {
    ASSIGN_OR_RETURN(const double us, StepUs(bench, k, kSteps));
    if (us < best) best_k = k;
    best = std::min(best, us);
  }
  ASSIGN_OR_RETURN(const double planned, StepUs(bench, -1, kSettledSteps));
  std::printf(
      "%-12s %-17s %-9s rows %5d  without %9.0f us  best fixed %9.0f us (%3d of %d)  planner %9.0f "
      "us"
      "  share of best %.3f  gain %.2f\n",
      std::string(bench.scenario.machine.name).c_str(),
      std::string(bench.scenario.model.name).c_str(), NameOf(bench.policy),
      bench.scenario.prefill_rows, without, best, best_k, experts, planned, best / planned,
      without / planned);
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status RunAll(int rows) {
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / "tandem-prefill-bench";
  std::filesystem::create_directories(root);
  const PipelineModels models(root.string());
  for (const char* machine : {"rtx4090-2s", "rtx5090-1s", "h200-2s"}) {
    for (const char* model : {"qwen3-30b-int4", "qwen3-235b-int4", "deepseek-v3-int4"}) {
      Bench bench;
      bench.scenario.machine = *gpu::FindSimMachine(machine);
      bench.scenario.model = *gpu::FindSimModel(model);
      bench.scenario.model.layers = kLayers;
      bench.scenario.prefill_rows = rows;
      ASSIGN_OR_RETURN(bench.dir, models.DirOf(bench.scenario.model));
      ASSIGN_OR_RETURN(const gpu::SimShape shape, gpu::MakeSimShape(bench.scenario.model));
      for (const PipelinePolicy policy : {PipelinePolicy::kPlain, PipelinePolicy::kPingPong}) {
        bench.policy = policy;
        RETURN_IF_ERROR(Run(bench, shape.big.moe.experts));
      }
    }
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const int rows = argc == 3 && std::string(argv[1]) == "--rows" ? std::atoi(argv[2]) : 2048;
  const absl::Status status = RunAll(rows);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) { return tandem::bench::Main(argc, argv); }
