#include "common/model/host_memory.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string_view>

namespace tandem {
namespace {

std::optional<uint64_t> ParseNumber(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// A file that holds one number. "max" (no limit) reads as absent.
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  if (!(in >> word)) return std::nullopt;
  return ParseNumber(word);
}

// The sum of those keys of a file of "key value" lines; keys may end in ':'.
std::optional<uint64_t> ReadKeys(const std::string& path,
                                 std::initializer_list<std::string_view> keys) {
  std::ifstream in(path);
  std::optional<uint64_t> sum;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string key, value;
    if (!(words >> key >> value)) continue;
    for (std::string_view wanted : keys) {
      if (key != wanted) continue;
      if (const auto number = ParseNumber(value)) sum = sum.value_or(0) + *number;
    }
  }
  return sum;
}

struct CgroupFiles {
  std::string mount;  // with root
  const char* limit;
  const char* usage;
  std::initializer_list<std::string_view> cache_keys;
};

// The path after the last ':' of this process's line for `controller` ("" is v2's "0::").
std::string CgroupPath(const std::string& root, std::string_view controller) {
  std::ifstream in(root + "/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string wanted = "," + std::string(controller) + ",";
    if (names.find(wanted) != std::string::npos) return line.substr(second + 1);
  }
  return "/";
}

void TakeLeast(uint64_t bytes, const std::string& source, std::optional<HostMemory>& least) {
  if (!least || bytes < least->available_bytes) least = HostMemory{bytes, source};
}

// The cgroup at `path` and its ancestors. In a container the path may name a directory that is not
// visible; its ancestors, down to the mount, still are.
void AddCgroups(const std::string& root, const CgroupFiles& files, const std::string& path,
                std::optional<HostMemory>& least) {
  std::filesystem::path at = std::filesystem::path(path).relative_path();
  while (true) {
    const std::filesystem::path dir = std::filesystem::path(files.mount) / at;
    const auto limit = ReadNumber(dir / files.limit);
    const auto usage = ReadNumber(dir / files.usage);
    if (limit && usage) {
      const uint64_t cache = ReadKeys(dir / "memory.stat", files.cache_keys).value_or(0);
      const uint64_t used = *usage > cache ? *usage - cache : 0;
      const std::string name = (dir / files.limit).string().substr(root.size());
      TakeLeast(*limit > used ? *limit - used : 0, name, least);
    }
    if (at.empty() || at == at.parent_path()) return;
    at = at.parent_path();
  }
}

}  // namespace

absl::StatusOr<HostMemory> ReadHostMemory(const std::string& root) {
  std::optional<HostMemory> least;
  if (const auto kilobytes = ReadKeys(root + "/proc/meminfo", {"MemAvailable:"})) {
    TakeLeast(*kilobytes * 1024, "/proc/meminfo", least);
  }
  const CgroupFiles v2 = {
      root + "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file"}};
  AddCgroups(root, v2, CgroupPath(root, ""), least);
  const CgroupFiles v1 = {root + "/sys/fs/cgroup/memory",
                          "memory.limit_in_bytes",
                          "memory.usage_in_bytes",
                          {"total_inactive_file", "total_active_file"}};
  AddCgroups(root, v1, CgroupPath(root, "memory"), least);
  if (least) return *least;
  return absl::UnavailableError(
      "available memory is unknown: no /proc/meminfo and no cgroup limit");
}

}  // namespace tandem
