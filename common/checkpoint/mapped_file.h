#pragma once

// A whole regular file, mapped for reading.
//
// Thread safety: immutable. Ownership: owns the mapping; views into it must not outlive it.
// Errors: name the file. An empty file maps to no bytes.

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tandem {

class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  ~MappedFile();

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  const uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  int64_t mtime_ns() const { return mtime_ns_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), bytes_}; }

 private:
  MappedFile() = default;

  std::string path_;
  const uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  int64_t mtime_ns_ = 0;
};

}  // namespace tandem
