#include "gateway/api/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <cctype>
#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/base/check.h"

namespace tandem::gateway {

ApiKeys::Hash ApiKeys::HashOf(std::string_view text) {
  Hash hash{};
  unsigned int size = 0;
  TANDEM_CHECK(EVP_Digest(text.data(), text.size(), hash.data(), &size, EVP_sha256(), nullptr) ==
               1);
  return hash;
}

ApiKeys::ApiKeys(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) hashes_.push_back(HashOf(key));
}

absl::StatusOr<std::vector<std::string>> ApiKeys::ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path.string(), ": cannot be read"));
  std::vector<std::string> keys;
  for (std::string line; std::getline(file, line);) {
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
    if (!line.empty() && line.front() != '#') keys.push_back(line);
  }
  if (keys.empty()) return absl::InvalidArgumentError(absl::StrCat(path.string(), ": has no key"));
  return keys;
}

absl::StatusOr<std::string> ApiKeys::Tenant(std::string_view key) const {
  if (hashes_.empty()) return std::string();
  const Hash hash = HashOf(key);
  int matches = 0;
  for (const Hash& known : hashes_) {
    matches |= CRYPTO_memcmp(hash.data(), known.data(), hash.size()) == 0;
  }
  if (matches == 0) {
    return absl::UnauthenticatedError(key.empty() ? "An API key is required."
                                                  : "The API key is not known.");
  }
  // Hashed once more: the tenant appears in logs and must not be the stored hash.
  const Hash tenant = HashOf({reinterpret_cast<const char*>(hash.data()), hash.size()});
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(tenant.data()), 8));
}

std::string_view BearerKey(std::string_view authorization) {
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() < kScheme.size()) return {};
  for (size_t i = 0; i < kScheme.size(); ++i) {
    if (std::tolower(static_cast<unsigned char>(authorization[i])) != kScheme[i]) return {};
  }
  authorization.remove_prefix(kScheme.size());
  while (!authorization.empty() && authorization.front() == ' ') authorization.remove_prefix(1);
  return authorization;
}

}  // namespace tandem::gateway
