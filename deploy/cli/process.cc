#include "deploy/cli/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

// What the child does between fork and exec: async-signal-safe calls only, since other threads of
// the parent may hold locks. Exit code 127 as the shell's "cannot execute".
[[noreturn]] void ExecuteChild(const ProcessSpec& spec, char* const* argv, pid_t parent, int log) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // the parent died before the line above
  setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const int fd : spec.inherited_fds) fcntl(fd, F_SETFD, 0);
  if (log >= 0) {
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
  }
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) dup2(null, STDIN_FILENO);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<pid_t> StartProcess(const ProcessSpec& spec) {
  if (access(spec.argv[0].c_str(), X_OK) != 0) {
    return absl::InternalError(
        absl::StrCat(spec.name, ": cannot execute ", spec.argv[0], ": ", std::strerror(errno)));
  }
  int log = -1;
  if (!spec.log_path.empty()) {
    log = open(spec.log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0) {
      return absl::InternalError(
          absl::StrCat(spec.name, ": cannot write ", spec.log_path, ": ", std::strerror(errno)));
    }
  }
  std::vector<char*> argv;
  for (const std::string& argument : spec.argv) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) ExecuteChild(spec, argv.data(), parent, log);
  const int error = errno;
  if (log >= 0) close(log);
  if (pid < 0) {
    return absl::InternalError(absl::StrCat(spec.name, ": cannot fork: ", std::strerror(error)));
  }
  return pid;
}

std::string DescribeExit(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int signal = WTERMSIG(wait_status);
    return absl::StrCat("signal ", signal, " (", strsignal(signal), ")");
  }
  return absl::StrCat("exit code ", WEXITSTATUS(wait_status));
}

}  // namespace tandem
