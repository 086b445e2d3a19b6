#include "deploy/cli/launch_plan.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/shares.h"

namespace tandem {
namespace {

class ArgumentList {
 public:
  explicit ArgumentList(std::string program) { arguments_.push_back(std::move(program)); }
  template <typename T>
  void Add(std::string_view flag, const T& value) {
    arguments_.push_back(absl::StrCat("--", std::string(flag), "=", value));
  }
  void AddIf(bool condition, std::string_view flag) {
    if (condition) arguments_.push_back("--" + std::string(flag));
  }
  std::vector<std::string> Take() { return std::move(arguments_); }

 private:
  std::vector<std::string> arguments_;
};

int MetricsPort(const ServeOptions& options, int offset) {
  return options.metrics_port == 0 ? 0 : options.metrics_port + offset;
}

// The first `threads` CPUs (0: all of them).
std::vector<int> Limit(const std::vector<int>& cpus, int threads) {
  if (threads <= 0 || threads >= static_cast<int>(cpus.size())) return cpus;
  return {cpus.begin(), cpus.begin() + threads};
}

ProcessSpec ExpertWorker(const LaunchInputs& in, int index, const std::vector<uint32_t>& shares,
                         const std::string& address) {
  const ServeOptions& options = in.options;
  const std::vector<int> cpus = Limit(WorkerCpus(in.topology, index), options.threads);
  ArgumentList list(in.program_dir + "/tandem-expert-worker");
  list.Add("listen", address);
  list.Add("link-socket", absl::StrCat(in.run_dir, "/expert", index, ".link"));
  list.Add("weights-fd", in.weight_fds[index]);
  list.Add("worker-index", index);
  list.Add("shares", absl::StrJoin(shares, ","));
  list.Add("cpus", FormatCpuList(cpus));
  list.Add("max-isa", options.max_isa);
  list.Add("huge-pages", options.huge_pages);
  if (!options.state_dir.empty()) list.Add("state-dir", options.state_dir);
  list.Add("weights", options.weights);
  list.Add("metrics-port", MetricsPort(options, 2 + index));
  list.Add("log-level", options.log_level);
  ProcessSpec spec;
  spec.name = absl::StrCat("expert_worker.", index);
  spec.argv = list.Take();
  spec.inherited_fds = {in.weight_fds[index]};
  return spec;
}

ProcessSpec GpuWorker(const LaunchInputs& in, const LaunchPlan& plan,
                      const std::vector<uint32_t>& shares) {
  const ServeOptions& options = in.options;
  ArgumentList list(in.program_dir + "/tandem-gpu-worker");
  list.Add("listen", plan.gpu_address);
  list.Add("link", options.link);
  if (!plan.expert_addresses.empty()) {
    list.Add("expert-workers", absl::StrJoin(plan.expert_addresses, ","));
    list.Add("expert-shares", absl::StrJoin(shares, ","));
    list.Add("placement", "co-located");
  }
  list.Add("cpus", FormatCpuList(Limit(in.topology.allowed_cpus, options.threads)));
  list.Add("max-isa", options.max_isa);
  list.Add("kv-cache-tokens", options.kv_cache_tokens);
  list.Add("max-context", options.max_context);
  list.Add("max-sequences", options.max_sequences);
  list.Add("max-step-rows", options.max_step_rows);
  list.Add("max-logprobs", options.max_logprobs);
  list.Add("metrics-port", MetricsPort(options, 1));
  list.Add("log-level", options.log_level);
  list.AddIf(options.parity, "parity");
  list.Add("pipeline", options.pipeline);
  list.Add("max-deferred", options.max_deferred);
  list.Add("max-deferred-mass", options.max_deferred_mass);
  list.AddIf(options.defer_prompts, "defer-prompts");
  list.Add("hot-experts-gb", options.hot_experts_gb);
  list.AddIf(options.stream_prompts, "stream-prompts");
  if (!options.state_dir.empty()) list.Add("state-dir", options.state_dir);
  ProcessSpec spec;
  spec.name = "gpu_worker";
  spec.argv = list.Take();
  return spec;
}

ProcessSpec Gateway(const LaunchInputs& in, const LaunchPlan& plan) {
  const ServeOptions& options = in.options;
  ArgumentList list(in.program_dir + "/tandem-gateway");
  list.Add("model", options.model);
  if (!options.served_model_name.empty()) list.Add("served-model-name", options.served_model_name);
  list.Add("gpu-worker", plan.gpu_address);
  list.Add("host", options.host);
  list.Add("http-port", options.http_port);
  list.Add("grpc-port", options.grpc_port);
  list.Add("metrics-port", MetricsPort(options, 0));
  list.Add("prefill-chunk-tokens", options.prefill_chunk_tokens);
  list.Add("max-queue-requests", options.max_queue_requests);
  list.Add("max-queue-tokens", options.max_queue_tokens);
  list.Add("max-logprobs", options.max_logprobs);
  if (!options.api_key_file.empty()) list.Add("api-key-file", options.api_key_file);
  list.Add("ports-file", plan.ports_file);
  list.Add("control-listen", absl::StrCat("unix:", in.run_dir, "/gateway.sock"));
  list.Add("log-level", options.log_level);
  ProcessSpec spec;
  spec.name = "gateway";
  spec.argv = list.Take();
  return spec;
}

}  // namespace

ProcessSpec WithPorts(ProcessSpec gateway, const BoundPorts& ports) {
  const std::pair<const char*, int> flags[] = {{"--http-port=", ports.http},
                                               {"--grpc-port=", ports.grpc},
                                               {"--metrics-port=", ports.metrics}};
  for (const auto& [flag, port] : flags) {
    for (std::string& argument : gateway.argv) {
      if (argument == absl::StrCat(flag, 0)) argument = absl::StrCat(flag, port);
    }
  }
  return gateway;
}

const std::vector<int>& WorkerCpus(const Topology& topology, int index) {
  return topology.nodes[index % topology.nodes.size()].cpus;
}

int ExpertWorkerCount(const ServeOptions& options, const Topology& topology) {
  if (options.link == "inprocess") return 0;
  if (options.expert_workers > 0) return options.expert_workers;
  return static_cast<int>(topology.nodes.size());
}

absl::StatusOr<std::vector<uint32_t>> ExpertShares(const ServeOptions& options, int workers) {
  std::vector<std::string> texts;
  if (!options.expert_shares.empty()) texts = absl::StrSplit(options.expert_shares, ',');
  return ParseShares(texts, static_cast<size_t>(workers), "--expert-shares");
}

absl::StatusOr<LaunchPlan> MakeLaunchPlan(const LaunchInputs& inputs) {
  LaunchPlan plan;
  // A worker that refuses its options would be started again and again.
  const std::string& pipeline = inputs.options.pipeline;
  if ((pipeline == "deferral" || pipeline == "both") && inputs.options.max_deferred == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--pipeline=", pipeline, " needs --max-deferred, how many experts of a token ",
                     "may be deferred"));
  }
  const int workers = ExpertWorkerCount(inputs.options, inputs.topology);
  if (inputs.options.weights == "map" && inputs.options.hot_experts_gb > 0 && workers > 0) {
    return absl::InvalidArgumentError(
        "--hot-experts-gb copies experts out of the workers' memory, where --weights=map puts "
        "none: --weights=copy is needed, or --hot-experts-gb=0");
  }
  auto shares = ExpertShares(inputs.options, workers);
  if (workers > 0 && !shares.ok()) return shares.status();
  for (int i = 0; i < workers; ++i) {
    plan.expert_addresses.push_back(absl::StrCat("unix:", inputs.run_dir, "/expert", i, ".sock"));
    plan.expert_workers.push_back(ExpertWorker(inputs, i, *shares, plan.expert_addresses[i]));
  }
  plan.gpu_address = absl::StrCat("unix:", inputs.run_dir, "/gpu.sock");
  plan.ports_file = inputs.run_dir + "/ports.json";
  plan.gpu_worker = GpuWorker(inputs, plan, workers > 0 ? *shares : std::vector<uint32_t>());
  plan.gateway = Gateway(inputs, plan);
  return plan;
}

}  // namespace tandem
