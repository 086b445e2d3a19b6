#pragma once

// A directory that appears under its name only when it is complete: it is made beside its place
// under a temporary name, and Commit renames it. Removed if it was not committed.
//
// Not thread-safe. Errors: ALREADY_EXISTS, RESOURCE_EXHAUSTED (space) and those of the file system,
// naming the directory.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

class OutputDirectory {
 public:
  struct Options {
    bool overwrite = false;     // an existing one may be replaced if it holds a config.json
    uint64_t needed_bytes = 0;  // refused when the file system has less
  };

  static absl::StatusOr<OutputDirectory> Create(const std::string& place, const Options& options);
  ~OutputDirectory();
  OutputDirectory(OutputDirectory&& other) noexcept;
  OutputDirectory& operator=(OutputDirectory&&) = delete;

  // Where to write.
  const std::string& path() const { return path_; }
  absl::Status Commit();

 private:
  OutputDirectory(std::string place, std::string path)
      : place_(std::move(place)), path_(std::move(path)) {}

  std::string place_;
  std::string path_;  // empty: nothing to remove
};

}  // namespace tandem
