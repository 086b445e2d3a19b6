#pragma once

// Finds test data: first tests/data of this tree, then the shared reference data beside the
// project (environment TANDEM_SHARED, else ../shared from the source root).
//
//   const auto path = SharedPath("golden/ops/moe.safetensors");
//   if (!path) GTEST_SKIP() << "no golden/ops/moe.safetensors";

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tandem::testing {

std::optional<std::filesystem::path> SharedPath(std::string_view relative);

// The root of the source tree.
std::filesystem::path SourceRoot();

// REQUIRES: the file exists. Returns its bytes.
std::string ReadWholeFile(const std::filesystem::path& path);

}  // namespace tandem::testing
