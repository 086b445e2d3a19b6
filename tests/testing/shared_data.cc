#include "tests/testing/shared_data.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "common/base/check.h"

namespace tandem::testing {

std::filesystem::path SourceRoot() { return TANDEM_SOURCE_ROOT; }

std::optional<std::filesystem::path> SharedPath(std::string_view relative) {
  const char* env = std::getenv("TANDEM_SHARED");
  const std::filesystem::path roots[] = {
      SourceRoot() / "tests" / "data",
      env != nullptr ? std::filesystem::path(env) : SourceRoot().parent_path() / "shared"};
  for (const auto& root : roots) {
    std::error_code error;
    if (std::filesystem::exists(root / relative, error)) return root / relative;
  }
  return std::nullopt;
}

std::string ReadWholeFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  TANDEM_CHECK(in.good());
  std::ostringstream bytes;
  bytes << in.rdbuf();
  return bytes.str();
}

}  // namespace tandem::testing
