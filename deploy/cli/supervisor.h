#pragma once

// Starts the processes of one machine and keeps them running: restarts what dies with back-off,
// kills what is stopped or hangs, ends everything on SIGTERM and SIGINT in order (gateway first,
// which drains). A process that was never ready and ends with kExitUsage, kExitAddressInUse or
// kExitBadModel ends the whole: restarting cannot mend it. All calls are made by the thread that
// made it; Stop may come from any thread.

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "deploy/cli/exit_code.h"
#include "deploy/cli/process.h"

namespace tandem {

struct SupervisorOptions {
  int64_t first_backoff_ms = 100;
  int64_t max_backoff_ms = 10'000;
  // A process that ran so long starts with the first back-off again.
  int64_t healthy_ms = 30'000;
  // How long a process may be stopped (SIGSTOP) or fail its probes before it is killed.
  int64_t stopped_grace_ms = 1'500;
  int64_t hung_grace_ms = 10'000;
  int64_t drain_ms = 30'000;
};

class Supervisor {
 public:
  struct Child {
    ProcessSpec spec;
    // True when the process answers; called outside of any lock with a short time of its own. Null:
    // only death counts.
    std::function<bool()> probe;
    // What is started in place of one that ended with an exit code (-1: by a signal). Null: `spec`.
    std::function<ProcessSpec(int exit_code)> respec = nullptr;
  };

  // `children` start in the given order and end in the reverse one.
  Supervisor(SupervisorOptions options, std::vector<Child> children);
  ~Supervisor();  // kills what still runs
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // REQUIRES: SIGCHLD, SIGTERM and SIGINT are blocked in every thread of the process.
  absl::Status Start();
  // Watches until Stop, a signal or a fatal exit. Returns the exit code of the whole.
  int Run();
  void Stop() { stop_.store(true); }
  // Why Run gave up; empty after an ordered end.
  const std::string& failure() const { return failure_; }
  // Deaths seen so far, for reports.
  int restarts() const { return restarts_; }

 private:
  struct State;

  // What the kernel tells of children: ends, stops, continuations.
  void ReapChildren();
  void OnExit(State& state, int wait_status);
  void StartDue();
  void CheckStopped();
  void CheckProbes();
  int Shutdown();
  void KillAll();

  const SupervisorOptions options_;
  std::vector<State> states_;
  std::atomic<bool> stop_{false};
  bool shutting_down_ = false;
  int fatal_exit_ = -1;
  std::string failure_;
  int restarts_ = 0;
};

}  // namespace tandem
