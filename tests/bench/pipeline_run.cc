#include "tests/bench/pipeline_run.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "tests/bench/measure.h"
#include "tests/bench/random_checkpoint.h"
#include "tests/gpu_worker/step_test_util.h"

namespace tandem::bench {
namespace {

using gpu::SimResource;

constexpr int kBlockTokens = 16;
constexpr int kPromptTokens = 4;      // of decoding streams: contexts are described, not computed
constexpr int kDecodeContext = 1024;  // room for the steps of a run
// Steps in which the planner has tried what it may try, with room to spare: each trial takes at
// most 64 steps.
constexpr int kPlannerDecodes = 320;
constexpr int kPlannerPrefills = 40;
constexpr int kVocab = 320;

gpu::GoldenOptions ModelOptions(const Scenario& scenario) {
  gpu::GoldenOptions options;
  options.parity = false;
  options.max_sequences = scenario.streams;
  options.max_step_rows = std::max(scenario.prefill_rows, scenario.streams * kPromptTokens);
  options.max_context =
      scenario.prefill_rows > 0 ? scenario.prefill_rows + kBlockTokens : kDecodeContext;
  return options;
}

gpu::PipelineOptions PipelineOf(const PolicyOptions& options) {
  using Mode = gpu::PlannerOptions::Mode;
  gpu::PipelineOptions out;
  out.measure_every = options.measure_every;
  const PipelinePolicy policy = options.policy;
  if (policy != PipelinePolicy::kPlain && policy != PipelinePolicy::kPingPong) {
    out.deferral = options.deferral;
  }
  switch (policy) {
    case PipelinePolicy::kPlain:
      out.mode = Mode::kPlain;
      break;
    case PipelinePolicy::kDeferral:
      out.mode = Mode::kDeferral;
      break;
    case PipelinePolicy::kPingPong:
      out.mode = Mode::kPingPong;
      break;
    case PipelinePolicy::kBoth:
      out.mode = Mode::kBoth;
      break;
    case PipelinePolicy::kPlanner:
      out.mode = Mode::kAuto;
      break;
  }
  return out;
}

}  // namespace

const char* NameOf(PipelinePolicy policy) {
  switch (policy) {
    case PipelinePolicy::kPlain:
      return "plain";
    case PipelinePolicy::kDeferral:
      return "deferral";
    case PipelinePolicy::kPingPong:
      return "pingpong";
    case PipelinePolicy::kBoth:
      return "both";
    case PipelinePolicy::kPlanner:
      return "planner";
  }
  return "";
}

absl::StatusOr<std::unique_ptr<PipelineRun>> PipelineRun::Create(const Scenario& scenario,
                                                                 const PolicyOptions& policy,
                                                                 const std::string& dir) {
  std::unique_ptr<PipelineRun> run(new PipelineRun(scenario));
  gpu::SimulatedOptions options;
  options.machine = scenario.machine;
  ASSIGN_OR_RETURN(options.shape, gpu::MakeSimShape(scenario.model));
  options.shape.context_offset = scenario.context_tokens;
  options.golden = ModelOptions(scenario);
  options.golden.pipeline = PipelineOf(policy);
  options.golden.hot_experts_bytes = policy.hot_experts_bytes;
  if (!policy.residents) options.golden.hot_policy.min_steps = UINT64_MAX;
  options.golden.stream_prompts = policy.stream_prompts;
  options.golden.fixed_streamed = policy.fixed_streamed;
  run->plans_ = policy.policy == PipelinePolicy::kPlanner;
  ASSIGN_OR_RETURN(run->model_, gpu::SimulatedModel::Load(dir, options));
  if (scenario.prefill_rows == 0) RETURN_IF_ERROR(run->Start());
  return run;
}

uint64_t PipelineRun::IdOf(int stream) const {
  return static_cast<uint64_t>(starts_ * scenario_.streams + stream + 1);
}

void PipelineRun::AddPrompt(worker::v1::Step& step, int stream, int tokens) const {
  const uint64_t id = IdOf(stream);
  worker::v1::SequenceStart& start = gpu::AddStart(step, id);
  start.mutable_stopping()->set_max_tokens(1'000'000);
  // Greedy sequences of a random model fall into cycles, each with experts of its own: policies
  // would be compared on different work.
  start.mutable_sampling()->set_temperature(2);
  start.mutable_sampling()->set_seed(static_cast<uint64_t>(stream));
  // Streams differ, or they would all pick the same experts.
  std::vector<uint32_t> ids;
  for (int i = 0; i < tokens; ++i) {
    ids.push_back(static_cast<uint32_t>(2 + (stream * 37 + i * 11) % (kVocab - 2)));
  }
  std::vector<uint32_t> blocks;
  const int context = scenario_.prefill_rows > 0 ? tokens : kDecodeContext;
  for (int i = 0; i < (context + kBlockTokens - 1) / kBlockTokens; ++i) {
    blocks.push_back(static_cast<uint32_t>(stream * kDecodeContext / kBlockTokens + i));
  }
  gpu::AddTokens(step, id, 0, ids, blocks, true);
}

absl::Status PipelineRun::Start() {
  worker::v1::Step step;
  for (int i = 0; i < scenario_.streams; ++i) step.add_release_sequence_ids(IdOf(i));
  ++starts_;
  steps_ = 0;
  for (int i = 0; i < scenario_.streams; ++i) AddPrompt(step, i, kPromptTokens);
  return Run(step).status();
}

absl::Status PipelineRun::WarmUp() {
  const int planned = scenario_.prefill_rows > 0 ? kPlannerPrefills : kPlannerDecodes;
  for (int i = 0; plans_ && i < planned; ++i) RETURN_IF_ERROR(Step().status());
  // Experts differ with positions: what is measured begins at the same ones under each policy.
  if (plans_ && scenario_.prefill_rows == 0) RETURN_IF_ERROR(Start());
  return Step().status();
}

void PipelineRun::SetWall(double dilation) {
  model_->device().timeline.Switch({.mode = gpu::SimMode::kWall, .dilation = dilation});
}

absl::StatusOr<StepSample> PipelineRun::Step() {
  worker::v1::Step step;
  if (scenario_.prefill_rows > 0) {
    step.add_release_sequence_ids(IdOf(0));
    ++starts_;
    AddPrompt(step, 0, scenario_.prefill_rows);
    return Run(step);
  }
  const auto position = static_cast<uint32_t>(kPromptTokens + steps_++);
  for (int i = 0; i < scenario_.streams; ++i) gpu::AddDecode(step, IdOf(i), position);
  return Run(step);
}

absl::StatusOr<StepSample> PipelineRun::Run(const worker::v1::Step& step) {
  gpu::SimDevice& device = model_->device();
  // What the last step left the experts with is not this one's.
  device.timeline.Drain(SimResource::kExperts);
  device.log.Take();
  const int64_t begin_ns = device.timeline.NowNs();
  const TimePoint begin = Now();
  worker::v1::StepResult result;
  model_->model().runner().Run(step, result);
  StepSample sample;
  sample.wall_us = SecondsSince(begin) * 1e6 / device.timeline.options().dilation;
  sample.virtual_us =
      static_cast<double>(device.timeline.TimeNs(SimResource::kCompute) - begin_ns) * 1e-3;
  if (result.outcome() != worker::v1::STEP_OUTCOME_OK) return absl::InternalError(result.error());
  const gpu::SimLog::Records records = device.log.Take();
  for (const auto& op : records.ops) {
    sample.device_stall_us += static_cast<double>(op.stall_ns) * 1e-3;
  }
  for (const auto& expert : records.experts) {
    sample.experts_stall_us += static_cast<double>(expert.stall_ns) * 1e-3;
  }
  sample.chosen = gpu::StepPolicyName(model_->model().runner().pipeline().choice().policy);
  sample.costs = CostsOf(records, device.LatencyNs());
  return sample;
}

absl::StatusOr<gpu::SimMachine> MachineOf(const Scenario& scenario, const std::string& dir) {
  if (scenario.device_to_experts == 0) return scenario.machine;
  gpu::SimMachine machine = scenario.machine;
  // Transfers do not stretch with the device, so the factor is approached.
  for (int round = 0; round < 4; ++round) {
    Scenario slowed = scenario;
    slowed.machine = machine;
    ASSIGN_OR_RETURN(const std::unique_ptr<PipelineRun> run, PipelineRun::Create(slowed, {}, dir));
    ASSIGN_OR_RETURN(const StepSample sample, run->Step());
    const double ratio =
        static_cast<double>(DeviceNs(sample.costs)) / static_cast<double>(ExpertsNs(sample.costs));
    machine = gpu::SlowerGpu(machine, scenario.device_to_experts / ratio);
  }
  return machine;
}

absl::StatusOr<int> DeferredFor(const Scenario& scenario, const std::string& dir) {
  constexpr int kSteps = 3;
  ASSIGN_OR_RETURN(const gpu::SimShape shape, gpu::MakeSimShape(scenario.model));
  std::vector<double> step_us;
  for (int deferred = 1; deferred <= shape.big.moe.top_k; ++deferred) {
    const PolicyOptions options{.policy = PipelinePolicy::kDeferral,
                                .deferral = {.max_deferred = deferred, .max_mass = 1},
                                .measure_every = 1000};
    ASSIGN_OR_RETURN(const auto run, PipelineRun::Create(scenario, options, dir));
    std::vector<double> samples;
    for (int i = 0; i < kSteps; ++i) {
      ASSIGN_OR_RETURN(const StepSample sample, run->Step());
      samples.push_back(sample.virtual_us);
    }
    step_us.push_back(Median(samples));
  }
  const double enough_us = *std::min_element(step_us.begin(), step_us.end()) * 1.01;
  const auto first =
      std::find_if(step_us.begin(), step_us.end(), [&](double us) { return us <= enough_us; });
  return static_cast<int>(first - step_us.begin()) + 1;
}

absl::StatusOr<std::string> PipelineModels::DirOf(const gpu::SimModel& model) const {
  // The same tensors serve every format of the described model.
  const nlohmann::json config = gpu::SmallConfig(model);
  const std::string name = absl::StrCat(config["model_type"].get<std::string>(), "-",
                                        config["num_hidden_layers"].get<int>());
  const std::filesystem::path dir = std::filesystem::path(root_) / name;
  if (std::filesystem::exists(dir)) return dir.string();
  const std::filesystem::path config_file = std::filesystem::path(root_) / (name + ".json");
  std::ofstream(config_file) << config.dump();
  RETURN_IF_ERROR(WriteRandomCheckpoint({.config_file = config_file.string(),
                                         .output_dir = dir.string(),
                                         .tokenizer_dir = {},
                                         .experts = std::nullopt,
                                         .max_file_bytes = 2'000'000})
                      .status());
  return dir.string();
}

}  // namespace tandem::bench
