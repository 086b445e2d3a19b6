#pragma once

// A directory of a test's own, removed with all it holds at the end.

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "common/base/check.h"

namespace tandem::testing {

class TempDir {
 public:
  TempDir() {
    std::string name = std::filesystem::temp_directory_path() / "tandem_test_XXXXXX";
    TANDEM_CHECK(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }

  // Writes one file, making its folder; returns its path.
  std::filesystem::path Write(std::string_view relative, std::string_view bytes) const {
    const std::filesystem::path file = path_ / relative;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream out(file, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    TANDEM_CHECK(out.good());
    return file;
  }

  // A writable copy of the regular files of `from`, which may be read-only.
  void CopyFrom(const std::filesystem::path& from) const {
    for (const auto& entry : std::filesystem::directory_iterator(from)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream in(entry.path(), std::ios::binary);
      std::ofstream out(path_ / entry.path().filename(), std::ios::binary | std::ios::trunc);
      out << in.rdbuf();
      TANDEM_CHECK(out.good());
    }
  }

 private:
  std::filesystem::path path_;
};

}  // namespace tandem::testing
