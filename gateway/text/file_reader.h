#pragma once

// Reads whole small files of a model directory, bounded.

#include <filesystem>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::gateway {

// NOT_FOUND if there is no such file, INVALID_ARGUMENT if it is not a regular file or larger than
// `max_bytes`; the message names the file.
absl::StatusOr<std::string> ReadTextFile(const std::filesystem::path& path, size_t max_bytes);

}  // namespace tandem::gateway
