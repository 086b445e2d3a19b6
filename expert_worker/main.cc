// tandem-expert-worker: routed experts of one NUMA node, in a process of its own.

#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/options.h"
#include "common/base/shares.h"
#include "common/base/signals.h"
#include "common/base/status.h"
#include "common/base/trace.h"
#include "common/hw/cpu_features.h"
#include "common/hw/numa_placement.h"
#include "common/hw/topology.h"
#include "common/rpc/rpc_server.h"
#include "common/rpc/trace_service.h"
#include "expert_worker/engine/model_experts.h"
#include "expert_worker/expert_worker.h"
#include "expert_worker/kernels/select.h"
#include "expert_worker/service.h"
#include "expert_worker/worker_metrics.h"

namespace tandem::expert {
namespace {

constexpr const char* kServiceName = "tandem.worker.v1.ExpertWorkerService";
// Calls end at once, a Load in progress included; a client may be slow to close its connection.
constexpr std::chrono::seconds kShutdownTimeout{1};

struct Flags {
  std::string listen = "unix:/tmp/tandem-expert.sock";
  std::string link_socket = "/tmp/tandem-expert.link";
  std::string model;
  int weights_fd = -1;
  int worker_index = 0;
  std::vector<std::string> shares = {"1"};
  std::string cpus;
  int threads = 0;
  std::string max_isa = "amx";
  std::string huge_pages = "auto";
  std::string state_dir;
  std::string weights = "copy";
  bool pack_only = false;
  std::string placement = "auto";
  std::string metrics_host = "127.0.0.1";
  int metrics_port = -1;
  std::string log_level = "info";
};

std::optional<int> ParseFlags(int argc, char** argv, Flags* flags) {
  OptionParser parser("tandem-expert-worker", "Computes routed experts on the CPUs of one node");
  parser.Add("listen", "gRPC address: unix:PATH or HOST:PORT", &flags->listen);
  parser.Add("link-socket", "Unix socket that hands over the shared-memory link",
             &flags->link_socket);
  parser.Add("model",
             "Model directory; replaces the one a Load names, and is loaded at once when given",
             &flags->model);
  parser.Add("weights-fd", "Descriptor of a memfd that keeps the packed weights; -1: our own",
             &flags->weights_fd, {.min = -1, .max = 1 << 20});
  parser.Add("worker-index", "This worker's place among the shares", &flags->worker_index,
             {.min = 0, .max = 1023});
  parser.AddList("shares", "Relative shares of all expert workers", &flags->shares);
  parser.Add("cpus", "CPUs to pin to, as 0-3,8; empty: all allowed ones", &flags->cpus);
  parser.Add("threads", "Threads; 0: one a CPU", &flags->threads, {.min = 0, .max = 512});
  parser.AddChoice("max-isa", "Best instruction set to use", &flags->max_isa,
                   {"ref", "avx2", "avx512", "amx"});
  parser.AddChoice("huge-pages", "Huge pages for the packed weights", &flags->huge_pages,
                   {"auto", "require", "off"});
  parser.Add("state-dir",
             "Directory that keeps packed weights between starts; empty: packed at each start",
             &flags->state_dir);
  parser.AddChoice("weights", "Copy packed weights into memory, or map the packed file",
                   &flags->weights, {"copy", "map"});
  parser.AddFlag("pack-only", "Write the packed weights of --model to --state-dir and exit",
                 &flags->pack_only);
  parser.AddChoice("placement", "Whether a gpu worker shares these CPUs", &flags->placement,
                   {"auto", "apart", "co-located"});
  parser.Add("metrics-host", "Address of /metrics", &flags->metrics_host);
  parser.Add("metrics-port", "Port of /metrics; 0 picks one, -1: none", &flags->metrics_port,
             {.min = -1, .max = 65535});
  parser.AddChoice("log-level", "debug, info, warn or error", &flags->log_level,
                   {"debug", "info", "warn", "error"});
  if (std::optional<int> code = parser.Parse(argc, argv)) return code;
  InitLogging("expert_worker", flags->log_level);
  LogInfo("starting", {{"options", parser.Summary()}});
  return std::nullopt;
}

absl::StatusOr<ExpertWorker::Options> MakeOptions(const Flags& flags,
                                                  const NumaPolicy* numa_policy) {
  ExpertWorker::Options options;
  options.link_socket = flags.link_socket;
  options.model_dir = flags.model;
  options.weights_fd = flags.weights_fd;
  ASSIGN_OR_RETURN(options.huge_pages, ParseHugePages(flags.huge_pages));
  options.state_dir = flags.state_dir;
  options.map_weights = flags.weights == "map";
  if (options.map_weights && options.state_dir.empty()) {
    return absl::InvalidArgumentError("--weights=map needs a --state-dir");
  }
  ASSIGN_OR_RETURN(const Isa cap, ParseIsa(flags.max_isa));
  const CpuFeatures features = DetectCpuFeatures();
  options.kernels = kernels::SelectKernelTable(cap, features);
  ASSIGN_OR_RETURN(ProcessCpus placed, PlaceProcess(flags.cpus, flags.threads));
  options.threads = placed.threads;
  options.cpus = std::move(placed.cpus);
  options.numa_node = CommonNode(DetectTopology({}), options.cpus);
  options.numa_policy = numa_policy;
  options.placement = flags.placement == "apart"        ? shm::Placement::kApart
                      : flags.placement == "co-located" ? shm::Placement::kColocated
                                                        : shm::Placement::kAuto;
  LogInfo("kernels", {{"table", options.kernels->name},
                      {"features", DescribeFeatures(features)},
                      {"threads", LogValue(options.threads)},
                      {"cpus", FormatCpuList(options.cpus)},
                      {"numa_node", LogValue(options.numa_node)}});
  return options;
}

// Waits for SIGTERM or SIGINT and keeps the health of the service up to date until it is ready.
void ServeUntilSignal(const sigset_t& signals, const ExpertWorker& worker, RpcServer& server) {
  const timespec poll{0, 100'000'000};
  while (worker.info().phase != ExpertWorker::Phase::kReady) {
    if (sigtimedwait(&signals, nullptr, &poll) > 0) return;
  }
  server.SetServing(true);
  int signal = 0;
  sigwait(&signals, &signal);
}

absl::Status Serve(const Flags& flags, const sigset_t& signals) {
  ASSIGN_OR_RETURN(const std::vector<uint32_t> shares,
                   ParseShares(flags.shares, flags.shares.size(), "--shares"));
  const KernelNumaPolicy numa_policy;
  ASSIGN_OR_RETURN(ExpertWorker::Options options, MakeOptions(flags, &numa_policy));
  Tracer tracer;
  options.tracer = &tracer;
  ExpertWorker worker(options);
  ExpertWorkerService service(&worker);
  TraceService trace_service("expert_worker", &tracer);
  std::unique_ptr<MetricsServer> metrics;
  if (flags.metrics_port >= 0) {
    ASSIGN_OR_RETURN(metrics, MetricsServer::Start(flags.metrics_host, flags.metrics_port,
                                                   std::make_shared<WorkerRegistry>(&worker)));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<RpcServer> server,
                   RpcServer::Start({.address = flags.listen, .service_name = kServiceName},
                                    {&service, &trace_service}));
  if (!flags.model.empty()) {
    RETURN_IF_ERROR(
        worker.StartLoad({flags.model, static_cast<uint32_t>(flags.worker_index), shares}));
  }
  LogInfo("listening",
          {{"address", flags.listen}, {"metrics_port", LogValue(metrics ? metrics->port() : -1)}});
  ServeUntilSignal(signals, worker, *server);
  LogInfo("draining");
  server->SetServing(false);
  worker.Drain();
  worker.Stop();
  server->Shutdown(kShutdownTimeout);
  return absl::OkStatus();
}

// Ends early, without a file, at a stop signal.
absl::Status Pack(const Flags& flags, const sigset_t& signals) {
  if (flags.model.empty() || flags.state_dir.empty()) {
    return absl::InvalidArgumentError("--pack-only needs --model and --state-dir");
  }
  ASSIGN_OR_RETURN(const ProcessCpus placed, PlaceProcess(flags.cpus, flags.threads));
  LoadProgress progress;
  std::atomic<bool> done{false};
  std::thread watch([&] {
    const timespec poll{0, 200'000'000};
    for (int ticks = 1; !done; ++ticks) {
      if (sigtimedwait(&signals, nullptr, &poll) > 0) progress.cancel = true;
      if (ticks % 25 != 0 || progress.total_bytes == 0) continue;
      LogInfo("packing", {{"percent", LogValue(100 * progress.loaded_bytes / progress.total_bytes)},
                          {"bytes", LogValue(progress.total_bytes.load())}});
    }
  });
  const auto packed = PackModel(flags.model, flags.state_dir, placed.threads, &progress);
  done = true;
  watch.join();
  if (packed.ok()) LogInfo("packed", {{"file", packed->path()}});
  return packed.status();
}

int Main(int argc, char** argv) {
  const sigset_t signals = BlockStopSignals();
  umask(0077);  // sockets are for this user only
  Flags flags;
  if (std::optional<int> code = ParseFlags(argc, argv, &flags)) return *code;
  const absl::Status status = flags.pack_only ? Pack(flags, signals) : Serve(flags, signals);
  if (!status.ok()) {
    LogError("exiting", {{"reason", status.ToString()}});
    return 1;
  }
  LogInfo("stopped");
  return 0;
}

}  // namespace
}  // namespace tandem::expert

int main(int argc, char** argv) { return tandem::expert::Main(argc, argv); }
