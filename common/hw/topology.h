#pragma once

// CPUs and NUMA nodes that this process may use. Only CPUs of the allowed set (cpuset, taskset)
// count: inside a container or under taskset a process must not start threads for the whole
// machine.

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

struct NumaNode {
  int id = 0;             // the kernel's node; simulated nodes all have the first real one's
  std::vector<int> cpus;  // allowed CPUs of the node, ascending
  bool simulated = false;
};

struct Topology {
  std::vector<int> allowed_cpus;  // ascending
  std::vector<NumaNode> nodes;    // those with at least one allowed CPU
};

// How nodes are found: kAuto asks the kernel, kOff sees one node, kSimulated cuts the allowed CPUs
// into `simulated_nodes` parts (for tests on one-node machines; where there are fewer CPUs than
// nodes, nodes share CPUs).
struct NumaOption {
  enum class Mode { kAuto, kOff, kSimulated } mode = Mode::kAuto;
  int simulated_nodes = 0;
};

// "auto", "off" or a number from 1 to 64. Errors: INVALID_ARGUMENT.
absl::StatusOr<NumaOption> ParseNumaOption(std::string_view text);

// CPUs this thread may run on. Never empty.
std::vector<int> AllowedCpus();

Topology DetectTopology(const NumaOption& option);

// The id of the node that all of `cpus` belong to; -1 if there is none.
int CommonNode(const Topology& topology, const std::vector<int>& cpus);

// "0-3,8" <-> {0, 1, 2, 3, 8}. Errors: INVALID_ARGUMENT.
std::string FormatCpuList(const std::vector<int>& cpus);
absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text);

// What a worker process runs on.
struct ProcessCpus {
  int threads = 1;
  std::vector<int> cpus;  // one a thread; empty where there are more threads than CPUs
};

// Keeps the calling thread, and all that it makes later, on the CPUs of `cpu_list` (empty: all that
// are allowed), for `threads` threads (0: one a CPU). What the kernel refuses is logged, not an
// error. Errors: INVALID_ARGUMENT for a bad list.
absl::StatusOr<ProcessCpus> PlaceProcess(std::string_view cpu_list, int threads);

// Pins the calling thread. Errors: FAILED_PRECONDITION when the CPU is not allowed (containers):
// the caller goes on unpinned and says so.
absl::Status PinThisThread(int cpu);

}  // namespace tandem
