#pragma once

// One child process of the supervisor: started by fork and exec, ended with its parent.
//
// Start must be called from a thread that lives as long as the children should: the kernel sends
// the parent-death signal when the forking *thread* ends.

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

struct ProcessSpec {
  std::string name;                // "gateway", "expert_worker.0": for logs
  std::vector<std::string> argv;   // argv[0] is the path of the program
  std::vector<int> inherited_fds;  // keep their numbers in the child
  std::string log_path;            // stderr and stdout go there; empty: the parent's
};

// Forks and executes. The child is in a process group of its own (the terminal's Ctrl-C reaches the
// supervisor alone) and is killed when the calling thread ends. Errors: INTERNAL naming the
// program.
absl::StatusOr<pid_t> StartProcess(const ProcessSpec& spec);

// "exit code 3" or "signal 9 (Killed)".
std::string DescribeExit(int wait_status);

}  // namespace tandem
