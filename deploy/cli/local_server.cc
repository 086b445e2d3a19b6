#include "deploy/cli/local_server.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/checkpoint/checkpoint.h"
#include "common/hw/cpu_features.h"
#include "common/hw/pages.h"
#include "common/model/model_loader.h"
#include "deploy/cli/exit_code.h"
#include "deploy/cli/generate_client.h"
#include "deploy/cli/host_plan.h"
#include "deploy/cli/worker_probe.h"

namespace tandem {
namespace {

constexpr int kProbeTimeoutMs = 1000;
constexpr int kReadyPollMs = 100;

std::string ProgramDir() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
}

void BlockSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

std::optional<BoundPorts> ReadPorts(const std::string& path) {
  std::ifstream in(path);
  if (!in.good()) return std::nullopt;
  const auto json = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  return BoundPorts{json.value("http", 0), json.value("grpc", 0), json.value("metrics", 0)};
}

std::string TailOf(const std::string& path, size_t lines) {
  std::ifstream in(path);
  std::vector<std::string> all;
  for (std::string line; std::getline(in, line);) all.push_back(line);
  std::string text;
  for (size_t i = all.size() > lines ? all.size() - lines : 0; i < all.size(); ++i) {
    text += all[i] + "\n";
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> ClientApiKey(const ServeOptions& options) {
  if (!options.api_key.empty() || options.api_key_file.empty()) return options.api_key;
  std::ifstream in(options.api_key_file);
  std::string key;
  while (key.empty() && std::getline(in, key)) {
  }
  if (key.empty()) return absl::NotFoundError("no API key in " + options.api_key_file);
  return key;
}

absl::StatusOr<std::unique_ptr<LocalServer>> LocalServer::Create(Settings settings) {
  BlockSignals();
  // The gateway inherits the key; on its command line others could read it.
  if (!settings.options.api_key.empty()) {
    setenv("TANDEM_API_KEY", settings.options.api_key.c_str(), 1);
  }
  auto server = std::unique_ptr<LocalServer>(new LocalServer());
  const ServeOptions& options = settings.options;
  ASSIGN_OR_RETURN(const NumaOption numa, ParseNumaOption(options.numa));
  LaunchInputs inputs{options, DetectTopology(numa), ProgramDir(), "", {}};
  ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(options.model));
  ASSIGN_OR_RETURN(const ModelSpec spec, LoadModelSpec(*checkpoint));
  // Without routed experts there is nothing for an expert worker to do.
  if (spec.moe.experts == 0) inputs.options.link = "inprocess";
  const int workers = ExpertWorkerCount(inputs.options, inputs.topology);
  std::vector<uint32_t> shares;
  if (workers > 0) {
    ASSIGN_OR_RETURN(shares, ExpertShares(options, workers));
  }
  ASSIGN_OR_RETURN(const HostMemory host, ReadHostMemory());
  ASSIGN_OR_RETURN(const HostPlan plan, PlanHost(options, spec, *checkpoint, shares, host));
  inputs.options.max_context = plan.max_context;
  inputs.options.kv_cache_tokens = plan.kv_cache_tokens;
  ASSIGN_OR_RETURN(RunDirectory directory, RunDirectory::Create());
  server->run_dir_ = std::make_unique<RunDirectory>(std::move(directory));
  inputs.run_dir = server->run_dir_->path();
  if (workers > 0) RETURN_IF_ERROR(server->KeepWeights(options.huge_pages, plan.expert_bytes));
  inputs.weight_fds = server->weight_fds_;
  ASSIGN_OR_RETURN(server->plan_, MakeLaunchPlan(inputs));
  server->report_ = absl::StrCat(
      "model      ", options.model, " (", spec.model_type, ", ", spec.layers.size(), " layers, ",
      spec.moe.experts, " experts)\n", "cpus       ", FormatCpuList(inputs.topology.allowed_cpus),
      " (", inputs.topology.allowed_cpus.size(), " allowed), ", inputs.topology.nodes.size(),
      inputs.topology.nodes[0].simulated ? " simulated" : "", " NUMA node(s), ", workers,
      " expert worker(s)\n", "features   ", DescribeFeatures(DetectCpuFeatures()), "; at most ",
      options.max_isa, options.parity ? "; parity mode" : "", "\n", plan.memory.ToString());
  if (settings.quiet) server->log_path_ = server->run_dir_->path() + "/tandem.log";
  server->settings_ = std::move(settings);
  return server;
}

// The weights outlive a worker in these descriptors while it restarts.
absl::Status LocalServer::KeepWeights(std::string_view huge_pages,
                                      const std::vector<uint64_t>& expert_bytes) {
  ASSIGN_OR_RETURN(HugePages policy, ParseHugePages(huge_pages));
  // Where the pool is too small, plain pages are given, and the worker says or refuses it by the
  // exact number.
  size_t pages = 0;
  for (const uint64_t bytes : expert_bytes) pages += HugePagesFor(bytes);
  if (pages == 0 || FreeHugePages() < pages) policy = HugePages::kOff;
  for (size_t i = 0; i < expert_bytes.size(); ++i) {
    const uint64_t bytes = policy == HugePages::kOff ? 0 : expert_bytes[i];
    ASSIGN_OR_RETURN(const Memfd memfd,
                     CreateMemfd(absl::StrCat("tandem-weights-", i), bytes, policy));
    weight_fds_.push_back(memfd.fd);
  }
  return absl::OkStatus();
}

LocalServer::~LocalServer() {
  supervisor_.reset();
  for (const int fd : weight_fds_) close(fd);
}

int LocalServer::Run(const std::function<void(const ReadyServer&)>& on_ready) {
  using Kind = WorkerKind;
  std::vector<Supervisor::Child> children;
  const auto add = [&](ProcessSpec spec, std::function<bool()> probe) {
    spec.log_path = log_path_;
    children.push_back({std::move(spec), std::move(probe)});
  };
  const auto probe = [](Kind kind, const std::string& address) {
    return [kind, address] { return ProbeWorker(kind, address, kProbeTimeoutMs).has_value(); };
  };
  for (size_t i = 0; i < plan_.expert_workers.size(); ++i) {
    add(plan_.expert_workers[i], probe(Kind::kExpertWorker, plan_.expert_addresses[i]));
  }
  add(plan_.gpu_worker, probe(Kind::kGpuWorker, plan_.gpu_address));
  add(plan_.gateway, nullptr);
  children.back().respec = [gateway = children.back().spec,
                            file = plan_.ports_file](int exit_code) {
    // Picked ports may have been taken meanwhile; then new ones are better than none.
    const auto ports = exit_code == kExitAddressInUse ? std::nullopt : ReadPorts(file);
    return ports ? WithPorts(gateway, *ports) : gateway;
  };
  supervisor_ = std::make_unique<Supervisor>(SupervisorOptions{}, std::move(children));
  const absl::Status started = supervisor_->Start();
  if (!started.ok()) {
    LogError("start_failed", {{"error", std::string(started.message())}});
    return kExitFailure;
  }
  std::thread watcher([this, &on_ready] { Watch(on_ready); });
  const int code = supervisor_->Run();
  ended_.store(true);
  watcher.join();
  return code;
}

ReadyServer LocalServer::Describe(const BoundPorts& ports) const {
  using Kind = WorkerKind;
  ReadyServer ready{ports, "", 0};
  const auto add = [&ready](Kind kind, const std::string& address) {
    const auto state = ProbeWorker(kind, address, kProbeTimeoutMs);
    if (!state) return;
    ready.kernels = state->kernels;
    ready.threads += state->threads;
  };
  for (const std::string& address : plan_.expert_addresses) add(Kind::kExpertWorker, address);
  if (plan_.expert_addresses.empty()) add(Kind::kGpuWorker, plan_.gpu_address);
  return ready;
}

// Shows loading progress until the API answers, then calls on_ready.
void LocalServer::Watch(const std::function<void(const ReadyServer&)>& on_ready) {
  const bool show = !settings_.quiet && isatty(STDERR_FILENO) != 0;
  const auto key = ClientApiKey(settings_.options);
  std::unique_ptr<GenerateClient> client;
  BoundPorts ports;
  while (!ended_.load()) {
    if (client == nullptr) {
      if (const auto bound = ReadPorts(plan_.ports_file)) {
        ports = *bound;
        client = std::make_unique<GenerateClient>(
            absl::StrCat(settings_.options.host == "0.0.0.0" ? "127.0.0.1" : settings_.options.host,
                         ":", ports.grpc),
            key.ok() ? *key : "");
      }
    } else if (client->Ready(kProbeTimeoutMs).ok()) {
      if (show) std::fputs("\r\033[K", stderr);
      on_ready(Describe(ports));
      return;
    }
    if (show) {
      const auto state = ProbeWorker(WorkerKind::kGpuWorker, plan_.gpu_address, kProbeTimeoutMs);
      if (state && state->total_bytes > 0) {
        std::fprintf(stderr, "\rloading %3d %% of %.1f MB",
                     static_cast<int>(100 * state->loaded_bytes / state->total_bytes),
                     static_cast<double>(state->total_bytes) * 1e-6);
      }
    }
    usleep(kReadyPollMs * 1000);
  }
}

std::string LocalServer::failure() const {
  std::string text = supervisor_ == nullptr ? "" : supervisor_->failure();
  if (!log_path_.empty() && !text.empty()) text += "\n" + TailOf(log_path_, 12);
  return text;
}

int RunWithServer(const ServeOptions& options, const std::function<int(const ReadyServer&)>& talk) {
  auto server = LocalServer::Create({options, /*quiet=*/true});
  if (!server.ok()) return PrintRefusal(server.status());
  int result = kExitFailure;
  const int code = (*server)->Run([&](const ReadyServer& ready) {
    result = talk(ready);
    (*server)->Stop();
  });
  if (!(*server)->failure().empty()) std::cerr << "tandem: " << (*server)->failure() << "\n";
  return code != kExitOk ? code : result;
}

}  // namespace tandem
