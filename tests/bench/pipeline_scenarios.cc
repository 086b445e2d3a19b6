#include "tests/bench/pipeline_scenarios.h"

#include <string_view>

#include "absl/strings/str_cat.h"

namespace tandem::bench {
namespace {

constexpr int kStreams[] = {1, 2, 4, 8};
constexpr int kContextTokens = 4096;
constexpr int kPrefillRows = 2048;
// A prefill step of all layers of a large model takes seconds; its layers are alike.
constexpr int kPrefillLayers = 16;

// Device and experts busy 28 % and 74 % of a step of DeepSeek-V3 in BF16 without deferral
// (KTransformers, SOSP 2025, ablation).
constexpr double kPaperRatio = 28.0 / 74;

Scenario Decode(const gpu::SimMachine& machine, const gpu::SimModel& model, int streams) {
  return {.name = absl::StrCat(std::string(machine.name), "/", std::string(model.name), "/decode-",
                               streams),
          .machine = machine,
          .model = model,
          .streams = streams,
          .context_tokens = kContextTokens};
}

Scenario Prefill(const gpu::SimMachine& machine, const gpu::SimModel& model) {
  Scenario scenario{.name = absl::StrCat(std::string(machine.name), "/", std::string(model.name),
                                         "/prefill-", kPrefillRows),
                    .machine = machine,
                    .model = model,
                    .prefill_rows = kPrefillRows};
  scenario.model.layers = kPrefillLayers;
  return scenario;
}

Scenario AtPaperRatio(std::string_view machine, std::string_view model, int streams) {
  Scenario scenario = Decode(*gpu::FindSimMachine(machine), *gpu::FindSimModel(model), streams);
  scenario.name = absl::StrCat("ratio-28-74/", scenario.name);
  scenario.device_to_experts = kPaperRatio;
  return scenario;
}

}  // namespace

std::vector<Scenario> PipelineScenarios() {
  std::vector<Scenario> scenarios;
  for (const int streams : kStreams) {
    scenarios.push_back(AtPaperRatio("a100-2s", "deepseek-v3-bf16", streams));
  }
  scenarios.push_back(AtPaperRatio("rtx4090-2s", "qwen3-30b-int4", 1));
  for (const std::string_view machine : {"rtx4090-2s", "rtx5090-1s", "h200-2s"}) {
    for (const std::string_view model : {"qwen3-30b-int4", "qwen3-235b-int4", "deepseek-v3-int4"}) {
      const gpu::SimMachine& m = *gpu::FindSimMachine(machine);
      for (const int streams : kStreams) {
        scenarios.push_back(Decode(m, *gpu::FindSimModel(model), streams));
      }
      scenarios.push_back(Prefill(m, *gpu::FindSimModel(model)));
    }
  }
  return scenarios;
}

}  // namespace tandem::bench
