// record_routing MODEL_DIR OUT STEPS: answers questions of the model's eval.jsonl greedily, one
// sequence at a time, and writes what the router picked for STEPS tokens in their order, prompts
// included, as a trace of one row a step (routing_traces.h).

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gateway/text/tokenizer.h"
#include "tests/gpu_worker/golden_model.h"
#include "tests/gpu_worker/hot_experts/routing_traces.h"

namespace tandem::gpu {
namespace {

constexpr uint32_t kNewTokens = 32;
// The tasks follow each other in the file: by turns they make the traffic of several users.
constexpr size_t kStride = 41;

std::vector<std::string> ReadPrompts(const std::string& dir) {
  std::ifstream file(dir + "/eval.jsonl");
  std::vector<std::string> prompts;
  for (std::string line; std::getline(file, line);) {
    const auto item = nlohmann::json::parse(line);
    if (item.contains("prompt")) {
      prompts.push_back(item["prompt"].get<std::string>());
    } else {
      const auto text = item["messages"][0]["content"].get<std::string>();
      prompts.push_back("<|im_start|>user\n" + text + "<|im_end|>\n<|im_start|>assistant\n");
    }
  }
  return prompts;
}

// Appends the picks of every position of one answered prompt.
void Record(GoldenModel& model, const std::vector<uint32_t>& prompt, RoutingTrace* trace) {
  GoldenDriver driver(model);
  driver.Generate({{.id = 1, .prompt = prompt}}, 0, kNewTokens);
  const auto& layers = driver.trace(1).picks;
  for (const auto& [position, first] : layers[0]) {
    for (const auto& layer : layers) {
      const std::vector<uint16_t>& ids = layer.at(position);
      trace->picks.insert(trace->picks.end(), ids.begin(), ids.end());
    }
    ++trace->steps;
  }
}

int Main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: record_routing MODEL_DIR OUT STEPS\n");
    return 2;
  }
  const std::string dir = argv[1];
  const int steps = std::atoi(argv[3]);
  const auto model = GoldenModel::Load(dir, {.max_step_rows = 512, .max_context = 1024});
  const auto tokenizer = gateway::Tokenizer::Load(dir);
  const std::vector<std::string> prompts = ReadPrompts(dir);
  if (!model.ok() || !tokenizer.ok() || prompts.empty()) {
    std::fprintf(stderr, "cannot load %s\n", dir.c_str());
    return 1;
  }
  const ModelSpec& spec = (*model)->spec();
  RoutingTrace trace;
  trace.shape = {.layers = static_cast<int>(spec.layers.size()),
                 .experts = spec.moe.experts,
                 .top_k = spec.moe.top_k};
  for (size_t i = 0; trace.steps < steps; i += kStride) {
    const auto ids = (*tokenizer)->Encode(prompts[i % prompts.size()], {});
    if (!ids.ok()) return 1;
    Record(**model, *ids, &trace);
  }
  trace.steps = steps;
  trace.picks.resize(static_cast<size_t>(steps * trace.shape.layers) * trace.layer_picks());
  WriteTrace(trace, argv[2]);
  return 0;
}

}  // namespace
}  // namespace tandem::gpu

int main(int argc, char** argv) { return tandem::gpu::Main(argc, argv); }
