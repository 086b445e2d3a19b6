#pragma once

// The private directory (0700) of one running server: its Unix sockets and small files. A lock file
// in it shows that its owner lives, so that directories which a killed server left are removed at
// the next start.

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

class RunDirectory {
 public:
  // Makes tandem-run-XXXXXX under $XDG_RUNTIME_DIR or /tmp, after removing dead ones of this user.
  static absl::StatusOr<RunDirectory> Create();
  // The same under a given directory, for tests.
  static absl::StatusOr<RunDirectory> CreateUnder(const std::string& parent);
  ~RunDirectory();  // removes it
  RunDirectory(RunDirectory&& other) noexcept;
  RunDirectory& operator=(RunDirectory&&) = delete;

  const std::string& path() const { return path_; }

 private:
  RunDirectory(std::string path, int lock_fd) : path_(std::move(path)), lock_fd_(lock_fd) {}

  std::string path_;
  int lock_fd_ = -1;
};

// Directories of this user's servers that run now, sorted, under $XDG_RUNTIME_DIR and /tmp.
std::vector<std::string> LiveRunDirectories();
// The same under given directories, for tests.
std::vector<std::string> LiveRunDirectoriesUnder(const std::vector<std::string>& parents);

// gRPC addresses of the control services of a server's processes: gateway, gpu_worker, expert
// workers. Empty where there are none.
std::vector<std::string> ControlAddresses(const std::string& run_directory);

}  // namespace tandem
