#include "gateway/text/template_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

extern char** environ;

namespace tandem::gateway {
namespace {

constexpr int kHelperChannel = 3;  // the descriptor that template_helper.py uses

absl::Status SystemError(std::string_view what, int error) {
  return absl::UnavailableError(
      absl::StrCat("template helper: ", std::string(what), ": ", strerror(error)));
}

// The helper gets no more of the environment than time zone, libraries and sanitizers need.
std::vector<char*> HelperEnvironment() {
  static char path[] = "PATH=/usr/bin:/bin";
  static char locale[] = "LANG=C.UTF-8";
  std::vector<char*> out = {path, locale};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    for (const std::string_view name : {"TZ=", "LD_LIBRARY_PATH=", "ASAN_OPTIONS=",
                                        "UBSAN_OPTIONS=", "TSAN_OPTIONS=", "LSAN_OPTIONS="}) {
      if (text.starts_with(name)) out.push_back(*entry);
    }
  }
  out.push_back(nullptr);
  return out;
}

// posix_spawn's two argument objects, freed together.
struct SpawnArguments {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;

  explicit SpawnArguments(int channel) {
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, channel, kHelperChannel);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addclosefrom_np(&actions, kHelperChannel + 1);
    posix_spawnattr_init(&attributes);
    sigset_t none;
    sigset_t all;
    sigemptyset(&none);
    sigfillset(&all);
    sigdelset(&all, SIGKILL);
    sigdelset(&all, SIGSTOP);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnArguments() {
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
  }
};

}  // namespace

absl::Status TemplateProcess::Start(const std::string& binary) {
  Kill();
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return SystemError("socketpair", errno);
  }
  // Only our end: the helper reads and writes in plain blocking calls.
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  SpawnArguments arguments(ends[1]);
  std::string name = binary;
  std::string flag = kTemplateHelperFlag;
  std::array<char*, 3> argv = {name.data(), flag.data(), nullptr};
  std::vector<char*> environment = HelperEnvironment();
  pid_t pid = 0;
  const int error = posix_spawn(&pid, binary.c_str(), &arguments.actions, &arguments.attributes,
                                argv.data(), environment.data());
  close(ends[1]);
  if (error != 0) {
    close(ends[0]);
    return SystemError("cannot start " + binary, error);
  }
  channel_ = ends[0];
  pid_.store(pid, std::memory_order_relaxed);
  return absl::OkStatus();
}

void TemplateProcess::Kill() {
  const pid_t pid = pid_.exchange(0, std::memory_order_relaxed);
  if (pid != 0) {
    kill(pid, SIGKILL);
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (channel_ >= 0) close(channel_);
  channel_ = -1;
}

absl::Status TemplateProcess::Failed(absl::Status status) {
  Kill();
  return status;
}

absl::Status TemplateProcess::Wait(short events, TimePoint deadline) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return absl::DeadlineExceededError("template helper: time limit");
    pollfd entry = {channel_, events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left.count(), 60'000)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return SystemError("poll", errno);
  }
}

absl::Status TemplateProcess::Send(std::string_view bytes, TimePoint deadline) {
  while (!bytes.empty()) {
    const ssize_t count = send(channel_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EAGAIN) {
      RETURN_IF_ERROR(Wait(POLLOUT, deadline));
    } else if (errno != EINTR) {
      return SystemError("it died", errno);
    }
  }
  return absl::OkStatus();
}

absl::Status TemplateProcess::Receive(char* bytes, size_t size, TimePoint deadline) {
  while (size > 0) {
    const ssize_t count = recv(channel_, bytes, size, 0);
    if (count > 0) {
      bytes += count;
      size -= static_cast<size_t>(count);
    } else if (count == 0) {
      return absl::UnavailableError("template helper: it died");
    } else if (errno == EAGAIN) {
      RETURN_IF_ERROR(Wait(POLLIN, deadline));
    } else if (errno != EINTR) {
      return SystemError("it died", errno);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TemplateProcess::Exchange(std::string_view request,
                                                      uint64_t reply_limit_bytes,
                                                      TimePoint deadline) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little endian");
  uint32_t size = static_cast<uint32_t>(request.size());
  if (size != request.size()) return absl::ResourceExhaustedError("template helper: request");
  std::string header(sizeof(size), '\0');
  memcpy(header.data(), &size, sizeof(size));
  absl::Status status = Send(header, deadline);
  if (status.ok()) status = Send(request, deadline);
  if (status.ok()) status = Receive(header.data(), sizeof(size), deadline);
  if (!status.ok()) return Failed(status);
  memcpy(&size, header.data(), sizeof(size));
  if (size == 0 || size > reply_limit_bytes) {
    return Failed(absl::ResourceExhaustedError("template helper: reply has a bad size"));
  }
  std::string reply(size, '\0');
  status = Receive(reply.data(), reply.size(), deadline);
  if (!status.ok()) return Failed(status);
  return reply;
}

}  // namespace tandem::gateway
