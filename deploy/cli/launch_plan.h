#pragma once

// Which processes a server consists of on this machine, with their command lines: pure arithmetic
// on options and topology, so that it can be printed and tested without starting anything.

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/hw/topology.h"
#include "deploy/cli/process.h"
#include "deploy/cli/serve_options.h"

namespace tandem {

struct LaunchInputs {
  ServeOptions options;
  Topology topology;
  std::string program_dir;      // where the tandem-* programs are
  std::string run_dir;          // sockets and small files
  std::vector<int> weight_fds;  // one a worker: memory that outlives it
};

struct LaunchPlan {
  std::vector<ProcessSpec> expert_workers;
  ProcessSpec gpu_worker;
  ProcessSpec gateway;
  std::vector<std::string> expert_addresses;  // gRPC, unix:...
  std::string gpu_address;
  std::string ports_file;  // the gateway writes the ports it bound there
};

struct BoundPorts {
  int http = 0;
  int grpc = 0;
  int metrics = 0;
};

// The gateway's command with the ports that an earlier one had picked in place of 0, so that
// clients of a restarted gateway find it where it was.
ProcessSpec WithPorts(ProcessSpec gateway, const BoundPorts& ports);

// How many expert workers the options mean on this machine.
int ExpertWorkerCount(const ServeOptions& options, const Topology& topology);

// The shares of the workers, from options.expert_shares. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::vector<uint32_t>> ExpertShares(const ServeOptions& options, int workers);

absl::StatusOr<LaunchPlan> MakeLaunchPlan(const LaunchInputs& inputs);

// CPUs of expert worker `index`: its NUMA node's; workers beyond the number of nodes share them.
const std::vector<int>& WorkerCpus(const Topology& topology, int index);

}  // namespace tandem
