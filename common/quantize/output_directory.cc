#include "common/quantize/output_directory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

absl::Status FileError(const std::string& path, std::string_view what, int error) {
  return absl::ErrnoToStatus(error,
                             absl::StrCat(path, ": ", std::string(what), ": ", strerror(error)));
}

absl::Status CheckPlace(const std::string& place, bool overwrite) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(place, error))) return absl::OkStatus();
  if (fs::is_directory(place, error) && fs::is_empty(place, error)) return absl::OkStatus();
  if (!overwrite) {
    return absl::AlreadyExistsError(place + ": exists; --overwrite replaces it");
  }
  // Whatever else it is, it was not made by us.
  if (fs::is_symlink(place, error) || !fs::exists(fs::path(place) / "config.json", error)) {
    return absl::AlreadyExistsError(place + ": exists and is not a model directory");
  }
  return absl::OkStatus();
}

absl::Status CheckSpace(const std::string& parent, uint64_t needed_bytes) {
  std::error_code error;
  const fs::space_info space = fs::space(parent, error);
  if (error || space.available >= needed_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(parent, ": has ", space.available,
                                                   " bytes free, the output needs ", needed_bytes));
}

// The names in a directory reach the disk with it.
void SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

}  // namespace

absl::StatusOr<OutputDirectory> OutputDirectory::Create(const std::string& place,
                                                        const Options& options) {
  std::string name = fs::path(place).lexically_normal().string();
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  RETURN_IF_ERROR(CheckPlace(name, options.overwrite));
  const std::string parent = fs::absolute(name).parent_path().string();
  std::error_code error;
  fs::create_directories(parent, error);
  if (error) return FileError(parent, "cannot be made", error.value());
  RETURN_IF_ERROR(CheckSpace(parent, options.needed_bytes));
  std::string path = name + ".partial-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) return FileError(path, "cannot be made", errno);
  OutputDirectory directory(name, path);
  if (chmod(path.c_str(), 0755) != 0) return FileError(path, "cannot be opened to others", errno);
  return directory;
}

OutputDirectory::OutputDirectory(OutputDirectory&& other) noexcept
    : place_(std::move(other.place_)), path_(std::exchange(other.path_, "")) {}

OutputDirectory::~OutputDirectory() {
  if (path_.empty()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

absl::Status OutputDirectory::Commit() {
  SyncDirectory(path_);
  const std::string old = path_ + ".old";
  std::error_code error;
  // An empty directory can be renamed over; a full one steps aside first.
  const bool replaces = fs::is_directory(place_, error) && !fs::is_empty(place_, error);
  error.clear();  // "there is none" is one too
  if (replaces) fs::rename(place_, old, error);
  if (error) return FileError(place_, "cannot be moved aside", error.value());
  fs::rename(path_, place_, error);
  if (error) {
    const int failed = error.value();
    if (replaces) fs::rename(old, place_, error);
    return FileError(place_, "cannot be named so", failed);
  }
  path_.clear();
  SyncDirectory(fs::absolute(place_).parent_path().string());
  if (replaces) fs::remove_all(old, error);
  return absl::OkStatus();
}

}  // namespace tandem
