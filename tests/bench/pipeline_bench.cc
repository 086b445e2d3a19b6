// How near a step comes to the least time that its dependency graph allows (pipeline_bound.h), on
// machines that are described and not owned (gpu_worker/backend_sim): every scenario under every
// policy that the step runner offers.
//
//   pipeline_bench [--json FILE] [--scenario PART,...] [--policy NAME,...] [--steps N]
//                  [--dilation N] [--max-deferred N] [--max-deferred-mass X] [--measure-every N]
//
// Steps run in wall time, stretched by the dilation, and no core is occupied while a device op
// "runs"; all figures have the dilation taken out. Medians over the steps. The planner is measured
// after it has made its choice, which it makes from steps in virtual time. What our own software
// takes around device ops is measured beside it, undilated.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/options.h"
#include "common/base/status.h"
#include "gpu_worker/link_limits.h"
#include "gpu_worker/links/inprocess_expert_link.h"
#include "tests/bench/measure.h"
#include "tests/bench/null_backend.h"
#include "tests/bench/pipeline_run.h"
#include "tests/gpu_worker/step_test_util.h"
#include "tests/testing/temp_dir.h"

namespace tandem::bench {
namespace {

struct Flags {
  std::string json;
  std::vector<std::string> scenarios;  // parts of names; empty: all
  std::vector<std::string> policies;   // empty: all
  int steps = 5;
  int dilation = 20;
  int max_deferred = 0;  // chosen for each scenario
  double max_deferred_mass = 1;
  int measure_every = 16;  // a stamp is a launch
};

bool Matches(const std::vector<std::string>& wanted, const std::string& name, bool part) {
  return wanted.empty() || std::any_of(wanted.begin(), wanted.end(), [&](const std::string& w) {
           return part ? name.find(w) != std::string::npos : name == w;
         });
}

double MedianOf(const std::vector<StepSample>& samples,
                const std::function<double(const StepSample&)>& figure) {
  std::vector<double> values;
  for (const StepSample& sample : samples) values.push_back(figure(sample));
  return Median(values);
}

double BoundUs(const StepSample& sample) {
  return static_cast<double>(BoundNs(sample.costs)) * 1e-3;
}

nlohmann::json RowOf(const Scenario& scenario, PipelinePolicy policy,
                     const std::vector<StepSample>& samples, double plain_us) {
  const double step_us = MedianOf(samples, [](const auto& s) { return s.wall_us; });
  return {
      {"scenario", scenario.name},
      {"policy", NameOf(policy)},
      {"chosen", samples.back().chosen},
      {"streams", scenario.streams},
      {"step_us", step_us},
      {"bound_us", MedianOf(samples, BoundUs)},
      {"share_of_bound", MedianOf(samples, [](const auto& s) { return BoundUs(s) / s.wall_us; })},
      {"gain_over_plain", plain_us > 0 ? plain_us / step_us : 1.0},
      {"gpu_stall_us", MedianOf(samples, [](const auto& s) { return s.device_stall_us; })},
      {"cpu_stall_us", MedianOf(samples, [](const auto& s) { return s.experts_stall_us; })},
      {"gpu_busy_us",
       MedianOf(samples,
                [](const auto& s) { return static_cast<double>(DeviceNs(s.costs)) * 1e-3; })},
      {"cpu_busy_us",
       MedianOf(samples,
                [](const auto& s) { return static_cast<double>(ExpertsNs(s.costs)) * 1e-3; })},
      {"layers_to_experts", MedianOf(samples,
                                     [](const auto& s) {
                                       return static_cast<double>(LayersNs(s.costs)) /
                                              static_cast<double>(ExpertsNs(s.costs));
                                     })},
      {"virtual_us", MedianOf(samples, [](const auto& s) { return s.virtual_us; })}};
}

void PrintRow(const nlohmann::json& row) {
  std::printf("%-44s %-8s %-8s %3d %9.0f %9.0f %6.1f %% %6.2fx %5.2f %9.0f %9.0f %9.0f %9.0f\n",
              row["scenario"].get<std::string>().c_str(), row["policy"].get<std::string>().c_str(),
              row["chosen"].get<std::string>().c_str(), row["max_deferred"].get<int>(),
              row["step_us"].get<double>(), row["bound_us"].get<double>(),
              100 * row["share_of_bound"].get<double>(), row["gain_over_plain"].get<double>(),
              row["layers_to_experts"].get<double>(), row["gpu_stall_us"].get<double>(),
              row["cpu_stall_us"].get<double>(), row["gpu_busy_us"].get<double>(),
              row["cpu_busy_us"].get<double>());
  std::fflush(stdout);
}

// Answers at once with nothing.
class NoExperts final : public shm::BatchHandler {
 public:
  absl::Status Configure(const shm::BatchLimits&) override { return absl::OkStatus(); }
  void Run(const shm::ExpertBatch&, int, int) override {}
};

// A decode step of `streams` sequences with device ops that do nothing and experts that answer at
// once: what is left is validation, staging, enqueueing, the link's copies and reading results.
absl::StatusOr<double> SoftwareUs(const std::string& dir, int streams, int steps) {
  gpu::GoldenOptions options;
  options.parity = false;
  options.threads = 1;
  options.max_sequences = options.max_step_rows = streams;
  options.max_context = 16 * (steps / 16 + 2);
  options.wrap = [](gpu::CpuBackend& memory) { return std::make_unique<NullBackend>(memory); };
  ASSIGN_OR_RETURN(const auto model, gpu::GoldenModel::Load(dir, options));
  NoExperts experts;
  ASSIGN_OR_RETURN(
      const auto link,
      gpu::MakeInProcessExpertLink(
          {.limits = gpu::LinkLimits(model->spec(), streams, shm::RowType::kBf16)}, &experts));
  model->runner().set_link(link.get());
  worker::v1::StepResult result;
  std::vector<double> took_us;
  for (int s = 0; s <= steps; ++s) {
    worker::v1::Step step;
    for (int i = 0; i < streams; ++i) {
      const auto id = static_cast<uint64_t>(i) + 1;
      if (s > 0) {
        gpu::AddDecode(step, id, static_cast<uint32_t>(s));
        continue;
      }
      gpu::AddStart(step, id).mutable_stopping()->set_max_tokens(1'000'000);
      std::vector<uint32_t> blocks;
      for (int b = 0; b < options.max_context / 16; ++b) {
        blocks.push_back(static_cast<uint32_t>(i * options.max_context / 16 + b));
      }
      gpu::AddTokens(step, id, 0, {2}, blocks, true);
    }
    const TimePoint begin = Now();
    model->runner().Run(step, result);
    took_us.push_back(SecondsSince(begin) * 1e6);
    if (result.outcome() != worker::v1::STEP_OUTCOME_OK) return absl::InternalError(result.error());
  }
  return Median(took_us);
}

class Bench {
 public:
  explicit Bench(const Flags& flags) : flags_(flags), models_(dir_.path().string()) {
    json_["dilation"] = flags.dilation;
    json_["max_deferred_mass"] = flags.max_deferred_mass;
    json_["measure_every"] = flags.measure_every;
    json_["rows"] = nlohmann::json::array();
    json_["software"] = nlohmann::json::array();
  }

  absl::Status Run() {
    std::printf("dilation %dx, medians of %d steps, times in us\n", flags_.dilation, flags_.steps);
    std::printf("%-44s %-8s %-8s %3s %9s %9s %8s %7s %5s %9s %9s %9s %9s\n", "scenario", "policy",
                "chosen", "max", "step", "bound", "share", "gain", "g/c", "gpu stall", "cpu stall",
                "gpu busy", "cpu busy");
    for (const Scenario& scenario : PipelineScenarios()) {
      if (!Matches(flags_.scenarios, scenario.name, true)) continue;
      RETURN_IF_ERROR(RunScenario(scenario));
    }
    RETURN_IF_ERROR(RunSoftware());
    return Write();
  }

 private:
  absl::Status RunScenario(Scenario scenario) {
    ASSIGN_OR_RETURN(const std::string dir, models_.DirOf(scenario.model));
    ASSIGN_OR_RETURN(scenario.machine, MachineOf(scenario, dir));
    ASSIGN_OR_RETURN(const int max_deferred, MaxDeferred(scenario, dir));
    double plain_us = 0;
    for (const PipelinePolicy policy : kPipelinePolicies) {
      const bool plain = policy == PipelinePolicy::kPlain;  // what the others are compared with
      if (!plain && !Matches(flags_.policies, NameOf(policy), false)) continue;
      const auto samples = Measure(scenario, policy, max_deferred, dir);
      RETURN_IF_ERROR(samples.status());
      nlohmann::json row = RowOf(scenario, policy, *samples, plain_us);
      row["max_deferred"] = max_deferred;
      if (plain) plain_us = row["step_us"];
      PrintRow(row);
      json_["rows"].push_back(row);
    }
    if (scenario.prefill_rows == 0) {
      double& step_us = shortest_us_[{scenario.model.name, scenario.streams}];
      step_us = step_us == 0 ? plain_us : std::min(step_us, plain_us);
    }
    return absl::OkStatus();
  }

  // Prompt rows are not deferred.
  absl::StatusOr<int> MaxDeferred(const Scenario& scenario, const std::string& dir) const {
    if (flags_.max_deferred > 0 || scenario.prefill_rows > 0) return flags_.max_deferred;
    return DeferredFor(scenario, dir);
  }

  absl::StatusOr<std::vector<StepSample>> Measure(const Scenario& scenario, PipelinePolicy policy,
                                                  int max_deferred, const std::string& dir) const {
    const PolicyOptions options{
        .policy = policy,
        .deferral = {.max_deferred = max_deferred,
                     .max_mass = static_cast<float>(flags_.max_deferred_mass)},
        .measure_every = flags_.measure_every};
    ASSIGN_OR_RETURN(const std::unique_ptr<PipelineRun> run,
                     PipelineRun::Create(scenario, options, dir));
    RETURN_IF_ERROR(run->WarmUp());
    run->SetWall(flags_.dilation);
    std::vector<StepSample> samples;
    for (int i = 0; i < flags_.steps; ++i) {
      ASSIGN_OR_RETURN(StepSample sample, run->Step());
      samples.push_back(std::move(sample));
    }
    return samples;
  }

  // Against the shortest plain step of the scenarios that ran.
  absl::Status RunSoftware() {
    if (shortest_us_.empty()) return absl::OkStatus();
    std::printf(
        "\nour own software around device ops, undilated: a decode step with a device and "
        "experts that take no time\n");
    for (const auto& [key, step_us] : shortest_us_) {
      const auto& [model, streams] = key;
      ASSIGN_OR_RETURN(const std::string dir, models_.DirOf(*gpu::FindSimModel(model)));
      ASSIGN_OR_RETURN(const double software_us, SoftwareUs(dir, streams, 200));
      std::printf("%-20s streams %d  %7.1f us, %4.1f %% of its shortest step above\n",
                  std::string(model).c_str(), streams, software_us, 100 * software_us / step_us);
      json_["software"].push_back({{"model", model},
                                   {"streams", streams},
                                   {"software_us", software_us},
                                   {"share_of_step", software_us / step_us}});
    }
    return absl::OkStatus();
  }

  absl::Status Write() const {
    if (flags_.json.empty()) return absl::OkStatus();
    std::ofstream out(flags_.json);
    out << json_.dump(1) << '\n';
    out.close();
    return out ? absl::OkStatus()
               : absl::UnavailableError(absl::StrCat("cannot write ", flags_.json));
  }

  const Flags flags_;
  const testing::TempDir dir_;
  const PipelineModels models_;
  nlohmann::json json_;
  std::map<std::pair<std::string_view, int>, double> shortest_us_;
};

int Main(int argc, char** argv) {
  Flags flags;
  OptionParser parser("pipeline_bench", "Steps on simulated machines against their bounds");
  parser.Add("json", "File for the rows", &flags.json);
  parser.AddList("scenario", "Parts of names of the scenarios to run; all without",
                 &flags.scenarios);
  parser.AddList("policy", "Policies to run beside plain; all without", &flags.policies);
  parser.Add("steps", "Steps measured of each", &flags.steps, {.min = 1, .max = 200});
  parser.Add("dilation", "How much longer than described everything takes", &flags.dilation,
             {.min = 20, .max = 10'000});
  parser.Add(
      "max-deferred",
      "Experts of a token and layer that deferral may defer; 0: as few as do what more would",
      &flags.max_deferred, {.min = 0, .max = 64});
  parser.Add("max-deferred-mass", "Share of a token's router weight that it may defer",
             &flags.max_deferred_mass);
  parser.Add("measure-every", "Steps from one with time stamps to the next", &flags.measure_every,
             {.min = 1});
  if (const auto code = parser.Parse(argc, argv)) return *code;
  const absl::Status status = Bench(flags).Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) { return tandem::bench::Main(argc, argv); }
