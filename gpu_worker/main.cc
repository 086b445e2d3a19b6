// tandem-gpu-worker: attention, router, shared experts, head and sampling, in a process of its own.

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/options.h"
#include "common/base/shares.h"
#include "common/base/signals.h"
#include "common/base/status.h"
#include "common/base/trace.h"
#include "common/hw/cpu_features.h"
#include "common/hw/topology.h"
#include "common/rpc/rpc_server.h"
#include "common/rpc/trace_service.h"
#include "expert_worker/kernels/select.h"
#include "gpu_worker/engine.h"
#include "gpu_worker/gpu_metrics.h"
#include "gpu_worker/service.h"

namespace tandem::gpu {
namespace {

constexpr const char* kServiceName = "tandem.worker.v1.GpuWorkerService";
// Calls in progress are told to end; a step takes less.
constexpr std::chrono::seconds kShutdownTimeout{5};
// A step's tokens and block tables: 4 MB of the default limit hold a million ids.
constexpr int kMaxMessageBytes = 64 << 20;
// A gateway that was stopped or unplugged is dropped, and its sequences with it.
constexpr std::chrono::seconds kGatewayKeepalive{10};

struct Flags {
  std::string listen = "unix:/tmp/tandem-gpu.sock";
  std::vector<std::string> expert_workers;
  std::vector<std::string> expert_shares;
  std::string link = "shm";
  std::string placement = "auto";
  std::string device = "cpu";
  std::string pipeline = "auto";
  int max_deferred = 0;
  double max_deferred_mass = 1;
  bool defer_prompts = false;
  double hot_experts_gb = 0;
  bool stream_prompts = false;
  std::string state_dir;
  bool parity = false;
  std::string cpus;
  int threads = 0;
  std::string max_isa = "amx";
  int max_step_rows = 512;
  int max_sequences = 16;
  int max_context = 0;
  int64_t kv_cache_tokens = 0;
  int max_logprobs = 20;
  std::string metrics_host = "127.0.0.1";
  int metrics_port = -1;
  std::string log_level = "info";
};

void AddModelFlags(OptionParser& parser, Flags& flags) {
  parser.AddFlag("parity", "F32 on the link and in the KV cache, for comparison with references",
                 &flags.parity);
  parser.Add("max-step-rows", "Token rows of the largest step", &flags.max_step_rows,
             {.min = 1, .max = 65536});
  parser.Add("max-sequences", "Sequences at once", &flags.max_sequences, {.min = 1, .max = 4096});
  parser.Add("max-context", "Tokens of the longest sequence; 0: the model's", &flags.max_context,
             {.min = 0, .max = 1 << 24});
  parser.Add("kv-cache-tokens", "Tokens the KV cache holds; 0: a quarter of the free memory",
             &flags.kv_cache_tokens, {.min = 0, .max = int64_t{1} << 31});
  parser.Add("max-logprobs", "Most likely tokens that a request may ask for, a position",
             &flags.max_logprobs, {.min = 0, .max = 1 << 20});
}

void AddPipelineFlags(OptionParser& parser, Flags& flags) {
  parser.AddChoice("pipeline", "How device and experts overlap; auto: by measured times",
                   &flags.pipeline, {"auto", "plain", "deferral", "pingpong", "both"});
  parser.Add("max-deferred",
             "Experts of a token and layer whose sums may come a layer late; 0: exact",
             &flags.max_deferred, {.min = 0, .max = 256});
  parser.Add("max-deferred-mass", "Share of a token's router weight that they may have, 0 to 1",
             &flags.max_deferred_mass, {.min = 0, .max = 1});
  parser.AddFlag("defer-prompts", "Prompt tokens defer experts as well", &flags.defer_prompts);
  parser.Add("hot-experts-gb", "Device memory (GB) for the busiest routed experts; 0: none",
             &flags.hot_experts_gb, {.min = 0, .max = 4096});
  parser.AddFlag("stream-prompts",
                 "Long prompts stream experts through the hot experts' memory, if that is faster",
                 &flags.stream_prompts);
  parser.Add("state-dir", "Keeps what was busy between starts; empty: nothing is kept",
             &flags.state_dir);
}

PlannerOptions::Mode ParsePipeline(const std::string& name) {
  using Mode = PlannerOptions::Mode;
  if (name == "plain") return Mode::kPlain;
  if (name == "deferral") return Mode::kDeferral;
  if (name == "pingpong") return Mode::kPingPong;
  if (name == "both") return Mode::kBoth;
  return Mode::kAuto;
}

absl::StatusOr<PipelineOptions> MakePipelineOptions(const Flags& flags) {
  const bool deferral = flags.pipeline == "deferral" || flags.pipeline == "both";
  if (deferral && flags.max_deferred == 0) {
    return absl::InvalidArgumentError("--pipeline=" + flags.pipeline +
                                      " needs --max-deferred, how many experts may be deferred");
  }
  return PipelineOptions{.mode = ParsePipeline(flags.pipeline),
                         .deferral = {.max_deferred = flags.max_deferred,
                                      .max_mass = static_cast<float>(flags.max_deferred_mass)},
                         .defer_prefill = flags.defer_prompts};
}

std::optional<int> ParseFlags(int argc, char** argv, Flags& flags) {
  OptionParser parser("tandem-gpu-worker", "Runs all of a model but its routed experts");
  parser.Add("listen", "gRPC address: unix:PATH or HOST:PORT", &flags.listen);
  parser.AddList("expert-workers", "gRPC addresses of the expert workers, in order of their shares",
                 &flags.expert_workers);
  parser.AddList("expert-shares", "Their relative shares of every expert; empty: equal",
                 &flags.expert_shares);
  parser.AddChoice("link", "Where routed experts run: own processes or this one", &flags.link,
                   {"shm", "inprocess"});
  parser.AddChoice("placement", "Whether expert workers share these CPUs", &flags.placement,
                   {"auto", "apart", "co-located"});
  parser.AddChoice("device", "What executes the graph", &flags.device, {"cpu"});
  AddModelFlags(parser, flags);
  AddPipelineFlags(parser, flags);
  parser.Add("cpus", "CPUs to pin to, as 0-3,8; empty: all allowed ones", &flags.cpus);
  parser.Add("threads", "Threads; 0: one a CPU", &flags.threads, {.min = 0, .max = 512});
  parser.AddChoice("max-isa", "Best instruction set to use", &flags.max_isa,
                   {"ref", "avx2", "avx512", "amx"});
  parser.Add("metrics-host", "Address of /metrics", &flags.metrics_host);
  parser.Add("metrics-port", "Port of /metrics; 0 picks one, -1: none", &flags.metrics_port,
             {.min = -1, .max = 65535});
  parser.AddChoice("log-level", "debug, info, warn or error", &flags.log_level,
                   {"debug", "info", "warn", "error"});
  if (std::optional<int> code = parser.Parse(argc, argv)) return code;
  InitLogging("gpu_worker", flags.log_level);
  LogInfo("starting", {{"options", parser.Summary()}});
  return std::nullopt;
}

// Differs at every start, so that a gateway notices a restart: sequences and blocks are gone.
uint64_t MakeEpoch() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  return static_cast<uint64_t>(ns) * 2 + 1;
}

absl::StatusOr<WorkerOptions> MakeOptions(const Flags& flags) {
  WorkerOptions options;
  const size_t workers = flags.link == "inprocess" ? std::max<size_t>(1, flags.expert_shares.size())
                                                   : flags.expert_workers.size();
  ASSIGN_OR_RETURN(options.expert_shares,
                   ParseShares(flags.expert_shares, workers, "--expert-shares"));
  ASSIGN_OR_RETURN(const Isa cap, ParseIsa(flags.max_isa));
  const CpuFeatures features = DetectCpuFeatures();
  options.kernels = kernels::SelectKernelTable(cap, features);
  ASSIGN_OR_RETURN(ProcessCpus placed, PlaceProcess(flags.cpus, flags.threads));
  options.threads = placed.threads;
  options.cpus = std::move(placed.cpus);
  options.parity = flags.parity;
  options.inprocess_experts = flags.link == "inprocess";
  options.expert_addresses = flags.expert_workers;
  options.placement = flags.placement == "apart"        ? shm::Placement::kApart
                      : flags.placement == "co-located" ? shm::Placement::kColocated
                                                        : shm::Placement::kAuto;
  options.max_step_rows = std::max(flags.max_step_rows, flags.max_sequences);
  options.max_sequences = flags.max_sequences;
  options.max_context = flags.max_context;
  options.kv_cache_tokens = flags.kv_cache_tokens;
  options.max_logprobs = flags.max_logprobs;
  options.hot_experts_bytes = static_cast<uint64_t>(flags.hot_experts_gb * 1e9);
  options.stream_prompts = flags.stream_prompts;
  options.state_dir = flags.state_dir;
  ASSIGN_OR_RETURN(options.pipeline, MakePipelineOptions(flags));
  options.epoch = MakeEpoch();
  LogInfo("kernels", {{"table", options.kernels->name},
                      {"features", DescribeFeatures(features)},
                      {"threads", LogValue(options.threads)},
                      {"cpus", FormatCpuList(options.cpus)}});
  return options;
}

// Waits for SIGTERM or SIGINT and keeps the health of the service up to date.
void ServeUntilSignal(const sigset_t& signals, const GpuEngine& engine, RpcServer& server) {
  constexpr timespec kPoll{0, 200'000'000};
  bool serving = false;
  while (sigtimedwait(&signals, nullptr, &kPoll) < 0) {
    const bool ready = engine.state().ready;
    if (ready != serving) server.SetServing(ready);
    serving = ready;
  }
}

absl::Status Serve(const Flags& flags, const sigset_t& signals) {
  ASSIGN_OR_RETURN(WorkerOptions options, MakeOptions(flags));
  Tracer tracer;
  options.tracer = &tracer;
  GpuEngine engine(options);
  GpuWorkerService service(&engine);
  TraceService trace_service("gpu_worker", &tracer);
  std::unique_ptr<MetricsServer> metrics;
  if (flags.metrics_port >= 0) {
    ASSIGN_OR_RETURN(metrics, MetricsServer::Start(flags.metrics_host, flags.metrics_port,
                                                   std::make_shared<GpuRegistry>(&engine)));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<RpcServer> server,
                   RpcServer::Start({.address = flags.listen,
                                     .service_name = kServiceName,
                                     .max_message_bytes = kMaxMessageBytes,
                                     .keepalive = kGatewayKeepalive},
                                    {&service, &trace_service}));
  LogInfo("listening",
          {{"address", flags.listen}, {"metrics_port", LogValue(metrics ? metrics->port() : -1)}});
  ServeUntilSignal(signals, engine, *server);
  LogInfo("draining");
  server->SetServing(false);
  engine.Stop();
  server->Shutdown(kShutdownTimeout);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const sigset_t signals = BlockStopSignals();
  umask(0077);  // sockets are for this user only
  Flags flags;
  if (std::optional<int> code = ParseFlags(argc, argv, flags)) return *code;
  const absl::Status status = Serve(flags, signals);
  if (!status.ok()) {
    LogError("exiting", {{"reason", status.ToString()}});
    return 1;
  }
  LogInfo("stopped");
  return 0;
}

}  // namespace
}  // namespace tandem::gpu

int main(int argc, char** argv) { return tandem::gpu::Main(argc, argv); }
