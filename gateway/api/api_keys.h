#pragma once

// API keys that clients must present. Only SHA-256 hashes are kept, and all of them are compared in
// constant time, so neither memory nor timing gives a key away.
//
// Thread safety: immutable after construction.

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem::gateway {

class ApiKeys {
 public:
  // No keys: everyone is let in.
  ApiKeys() = default;
  explicit ApiKeys(const std::vector<std::string>& keys);

  // One key a line; blank lines and lines that begin with # are skipped. Errors name the file;
  // a file without a key is an error, since it would open the server.
  static absl::StatusOr<std::vector<std::string>> ReadFile(const std::filesystem::path& path);

  bool required() const { return !hashes_.empty(); }

  // The tenant that `key` stands for (a name derived from its hash), or UNAUTHENTICATED. Without
  // keys every client is the tenant "".
  absl::StatusOr<std::string> Tenant(std::string_view key) const;

 private:
  using Hash = std::array<uint8_t, 32>;
  static Hash HashOf(std::string_view text);

  std::vector<Hash> hashes_;
};

// The key in an Authorization header ("Bearer KEY"); empty if it is of another kind.
std::string_view BearerKey(std::string_view authorization);

}  // namespace tandem::gateway
