#include "deploy/cli/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"

namespace tandem {
namespace {

constexpr char kPrefix[] = "tandem-run-";
constexpr char kLockName[] = "/lock";
constexpr char kGpuSocketName[] = "/gpu.sock";

bool OwnedByUs(const std::string& path) {
  struct stat info = {};
  return lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid();
}

// A directory whose lock nobody holds belongs to a server that is gone.
void RemoveDeadDirectories(const std::string& parent) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(parent, error)) {
    const std::string path = entry.path().string();
    if (!entry.path().filename().string().starts_with(kPrefix) || !OwnedByUs(path)) continue;
    const int fd = open((path + kLockName).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
      std::filesystem::remove_all(path, error);
      LogInfo("stale_run_directory_removed", {{"path", path}});
    }
    close(fd);
  }
}

// $XDG_RUNTIME_DIR where it can be used, then /tmp.
std::vector<std::string> Parents() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/' && access(runtime, W_OK) == 0) return {runtime, "/tmp"};
  return {"/tmp"};
}

// Only directories with sockets are asked: the lock of one that is just being made stays alone.
bool IsLive(const std::string& path) {
  if (!OwnedByUs(path) || access((path + kGpuSocketName).c_str(), F_OK) != 0) return false;
  const int fd = open((path + kLockName).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return false;
  const bool locked = flock(fd, LOCK_SH | LOCK_NB) != 0;
  close(fd);
  return locked;
}

}  // namespace

absl::StatusOr<RunDirectory> RunDirectory::Create() { return CreateUnder(Parents().front()); }

absl::StatusOr<RunDirectory> RunDirectory::CreateUnder(const std::string& parent) {
  RemoveDeadDirectories(parent);
  std::string path = absl::StrCat(parent, "/", kPrefix, "XXXXXX");
  if (mkdtemp(path.data()) == nullptr) {
    return absl::InternalError(
        absl::StrCat("cannot make a directory under ", parent, ": ", std::strerror(errno)));
  }
  const int fd = open((path + kLockName).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (fd >= 0) close(fd);
    return absl::InternalError(absl::StrCat("cannot lock ", path, ": ", std::strerror(error)));
  }
  return RunDirectory(std::move(path), fd);
}

RunDirectory::~RunDirectory() {
  if (lock_fd_ < 0) return;
  std::error_code error;
  std::filesystem::remove_all(path_, error);
  close(lock_fd_);
}

std::vector<std::string> LiveRunDirectories() { return LiveRunDirectoriesUnder(Parents()); }

std::vector<std::string> LiveRunDirectoriesUnder(const std::vector<std::string>& parents) {
  std::vector<std::string> live;
  for (const std::string& parent : parents) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(parent, error)) {
      const std::string path = entry.path().string();
      if (entry.path().filename().string().starts_with(kPrefix) && IsLive(path)) {
        live.push_back(path);
      }
    }
  }
  std::sort(live.begin(), live.end());
  live.erase(std::unique(live.begin(), live.end()), live.end());
  return live;
}

std::vector<std::string> ControlAddresses(const std::string& run_directory) {
  std::vector<std::string> addresses;
  const auto add = [&](const std::string& socket) {
    const std::string path = run_directory + socket;
    if (access(path.c_str(), F_OK) != 0) return false;
    addresses.push_back("unix:" + path);
    return true;
  };
  add("/gateway.sock");
  add(kGpuSocketName);
  for (int i = 0; add(absl::StrCat("/expert", i, ".sock")); ++i) {
  }
  return addresses;
}

RunDirectory::RunDirectory(RunDirectory&& other) noexcept
    : path_(std::move(other.path_)), lock_fd_(std::exchange(other.lock_fd_, -1)) {}

}  // namespace tandem
