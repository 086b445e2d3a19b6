#include "deploy/cli/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

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

}  // namespace

absl::StatusOr<RunDirectory> RunDirectory::Create() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const bool usable = runtime != nullptr && *runtime == '/' && access(runtime, W_OK) == 0;
  return CreateUnder(usable ? runtime : "/tmp");
}

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

RunDirectory::RunDirectory(RunDirectory&& other) noexcept
    : path_(std::move(other.path_)), lock_fd_(std::exchange(other.lock_fd_, -1)) {}

}  // namespace tandem
