#pragma once

// A whole server on this machine: checks the model and the memory plan, starts the processes under
// a Supervisor, and says when it is ready. Used by all commands that need one.

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "deploy/cli/launch_plan.h"
#include "deploy/cli/run_directory.h"
#include "deploy/cli/serve_options.h"
#include "deploy/cli/supervisor.h"

namespace tandem {

// A server that answers.
struct ReadyServer {
  BoundPorts ports;
  // What computes the experts (all of a dense model): kernels ("avx512_vbmi") and threads in all.
  std::string kernels;
  uint32_t threads = 0;
};

class LocalServer {
 public:
  struct Settings {
    ServeOptions options;
    bool quiet = false;  // children log to a file in the run directory instead of stderr
  };

  // Everything that can be refused before a process starts is refused here: a bad model directory,
  // a model that does not fit (with the budget printed in the message), bad options. REQUIRES: no
  // other thread runs yet (signals are blocked for all threads to come).
  static absl::StatusOr<std::unique_ptr<LocalServer>> Create(Settings settings);
  ~LocalServer();

  // What was decided: model, topology, kernels, memory plan. Several lines.
  const std::string& report() const { return report_; }

  // Starts the processes and supervises them until Stop or a signal, on the calling thread.
  // `on_ready` runs once, on a thread of its own, when the API serves the model; progress is shown
  // on stderr unless quiet. Returns the exit code.
  int Run(const std::function<void(const ReadyServer&)>& on_ready);
  void Stop() { supervisor_->Stop(); }

  // Why it ended early, with the last log lines of a quiet run.
  std::string failure() const;

 private:
  LocalServer() = default;
  absl::Status KeepWeights(std::string_view huge_pages, const std::vector<uint64_t>& expert_bytes);
  void Watch(const std::function<void(const ReadyServer&)>& on_ready);
  ReadyServer Describe(const BoundPorts& ports) const;

  Settings settings_;
  std::string report_;
  std::string log_path_;
  LaunchPlan plan_;
  std::vector<int> weight_fds_;
  std::unique_ptr<RunDirectory> run_dir_;
  std::unique_ptr<Supervisor> supervisor_;
  std::atomic<bool> ended_{false};
};

// Starts a server of these options, runs `talk` when it is ready, stops it. Returns talk's exit
// code, or that of a server that could not be started or ended, with the reason on stderr.
int RunWithServer(const ServeOptions& options, const std::function<int(const ReadyServer&)>& talk);

// The key that our own client uses: the given one, else the first of the key file, else none.
absl::StatusOr<std::string> ClientApiKey(const ServeOptions& options);

}  // namespace tandem
