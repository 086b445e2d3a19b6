#include "gateway/text/file_reader.h"

#include <fstream>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {

absl::StatusOr<std::string> ReadTextFile(const std::filesystem::path& path, size_t max_bytes) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError(absl::StrCat(path.string(), ": no such file"));
  }
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": not a regular file"));
  }
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), ": ", size, " bytes, at most ", max_bytes, " are read"));
  }
  std::string bytes(size, '\0');
  std::ifstream in(path, std::ios::binary);
  if (!in.read(bytes.data(), static_cast<std::streamsize>(size))) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": cannot be read"));
  }
  return bytes;
}

}  // namespace tandem::gateway
