#include "deploy/cli/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <future>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"

namespace tandem {
namespace {

constexpr int kTickMs = 100;
constexpr int64_t kProbeEveryMs = 1000;

int64_t NowMs() { return SteadyClock().NowNs() / 1'000'000; }

sigset_t WatchedSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

struct Supervisor::State {
  Child child;
  pid_t pid = -1;
  int64_t started_ms = 0;
  int64_t start_at_ms = 0;  // when pid < 0: next start
  int64_t backoff_ms = 0;
  int last_exit_code = -1;
  int64_t stopped_since_ms = -1;
  int64_t failing_since_ms = -1;
  int64_t next_probe_ms = 0;
  bool ever_answered = false;
  // The probe runs beside the watch loop, so that a slow one delays nothing.
  std::future<bool> probing;
};

Supervisor::Supervisor(SupervisorOptions options, std::vector<Child> children) : options_(options) {
  states_.resize(children.size());
  for (size_t i = 0; i < children.size(); ++i) states_[i].child = std::move(children[i]);
}

Supervisor::~Supervisor() { KillAll(); }

absl::Status Supervisor::Start() {
  for (State& state : states_) {
    auto pid = StartProcess(state.child.spec);
    if (!pid.ok()) return pid.status();
    state.pid = *pid;
    state.started_ms = NowMs();
    state.backoff_ms = options_.first_backoff_ms;
    LogInfo("process_started", {{"name", state.child.spec.name}, {"pid", LogValue(state.pid)}});
  }
  return absl::OkStatus();
}

int Supervisor::Run() {
  const sigset_t signals = WatchedSignals();
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  while (!stop_.load() && fatal_exit_ < 0) {
    pollfd poller = {signal_fd, POLLIN, 0};
    poll(&poller, 1, kTickMs);
    signalfd_siginfo info = {};
    bool end = false;
    while (read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
      end |= info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT;
    }
    if (end) {
      LogInfo("stopping", {{"reason", "signal"}});
      break;
    }
    ReapChildren();
    CheckStopped();
    CheckProbes();
    StartDue();
  }
  close(signal_fd);
  const int code = Shutdown();
  return fatal_exit_ >= 0 ? fatal_exit_ : code;
}

void Supervisor::ReapChildren() {
  for (State& state : states_) {
    int status = 0;
    constexpr int kEveryChange = WNOHANG | WUNTRACED | WCONTINUED;
    while (state.pid > 0 && waitpid(state.pid, &status, kEveryChange) == state.pid) {
      if (WIFSTOPPED(status)) {
        state.stopped_since_ms = NowMs();
      } else if (WIFCONTINUED(status)) {
        state.stopped_since_ms = -1;
      } else {
        OnExit(state, status);
      }
    }
  }
}

void Supervisor::OnExit(State& state, int wait_status) {
  const std::string how = DescribeExit(wait_status);
  state.pid = -1;
  state.stopped_since_ms = -1;
  state.failing_since_ms = -1;
  if (shutting_down_) return;
  const int code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
  const bool hopeless =
      code == kExitUsage || code == kExitAddressInUse || code == kExitBadModel || code == 127;
  if (hopeless && restarts_ == 0) {
    failure_ = absl::StrCat(state.child.spec.name, " ended with ", how);
    fatal_exit_ = code;
    return;
  }
  state.last_exit_code = code;
  const int64_t now = NowMs();
  if (now - state.started_ms >= options_.healthy_ms) state.backoff_ms = options_.first_backoff_ms;
  state.start_at_ms = now + state.backoff_ms;
  ++restarts_;
  LogError("process_died", {{"name", state.child.spec.name},
                            {"how", how},
                            {"restart_in_ms", LogValue(state.backoff_ms)}});
  state.backoff_ms = std::min(state.backoff_ms * 2, options_.max_backoff_ms);
}

void Supervisor::StartDue() {
  const int64_t now = NowMs();
  for (State& state : states_) {
    if (state.pid > 0 || now < state.start_at_ms || fatal_exit_ >= 0) continue;
    const Child& child = state.child;
    auto pid = StartProcess(child.respec ? child.respec(state.last_exit_code) : child.spec);
    if (!pid.ok()) {
      LogError("start_failed",
               {{"name", state.child.spec.name}, {"error", std::string(pid.status().message())}});
      state.start_at_ms = now + options_.max_backoff_ms;
      continue;
    }
    state.pid = *pid;
    state.started_ms = now;
    state.ever_answered = false;
    LogInfo("process_restarted", {{"name", state.child.spec.name}, {"pid", LogValue(state.pid)}});
  }
}

// A process stopped from outside would hold its clients forever: it is killed after a grace.
void Supervisor::CheckStopped() {
  const int64_t now = NowMs();
  for (State& state : states_) {
    if (state.pid <= 0 || state.stopped_since_ms < 0) continue;
    if (now - state.stopped_since_ms < options_.stopped_grace_ms) continue;
    LogError("process_killed", {{"name", state.child.spec.name}, {"reason", "stopped"}});
    kill(state.pid, SIGKILL);
    state.stopped_since_ms = -1;
  }
}

void Supervisor::CheckProbes() {
  const int64_t now = NowMs();
  for (State& state : states_) {
    if (state.pid <= 0 || !state.child.probe) continue;
    if (state.probing.valid()) {
      if (state.probing.wait_for(std::chrono::seconds(0)) != std::future_status::ready) continue;
      if (state.probing.get()) {
        state.ever_answered = true;
        state.failing_since_ms = -1;
      } else if (state.failing_since_ms < 0) {
        state.failing_since_ms = now;
      }
      // Before the first answer a process may still be starting; its death or exit code shows.
      if (state.ever_answered && state.failing_since_ms >= 0 &&
          now - state.failing_since_ms >= options_.hung_grace_ms) {
        LogError("process_killed", {{"name", state.child.spec.name}, {"reason", "hangs"}});
        kill(state.pid, SIGKILL);
        state.failing_since_ms = -1;
      }
    } else if (now >= state.next_probe_ms) {
      state.next_probe_ms = now + kProbeEveryMs;
      state.probing = std::async(std::launch::async, state.child.probe);
    }
  }
}

// The last child first: the gateway drains while its workers still serve it.
int Supervisor::Shutdown() {
  shutting_down_ = true;
  for (auto state = states_.rbegin(); state != states_.rend(); ++state) {
    if (state->pid <= 0) continue;
    kill(state->pid, SIGTERM);
    const int64_t deadline = NowMs() + options_.drain_ms;
    while (state->pid > 0 && NowMs() < deadline) {
      ReapChildren();
      if (state->pid > 0) usleep(5'000);
    }
    if (state->pid > 0) {
      LogWarn("process_killed", {{"name", state->child.spec.name}, {"reason", "did not drain"}});
    }
  }
  KillAll();
  return failure_.empty() ? kExitOk : kExitFailure;
}

void Supervisor::KillAll() {
  for (State& state : states_) {
    if (state.pid <= 0) continue;
    kill(state.pid, SIGKILL);
    waitpid(state.pid, nullptr, 0);
    state.pid = -1;
  }
}

}  // namespace tandem
