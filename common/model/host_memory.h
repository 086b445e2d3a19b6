#pragma once

// How much host memory this process tree may still take: the least of /proc/meminfo's MemAvailable
// and, for the cgroup of this process and each of its ancestors, limit - usage + page cache. File
// pages count as free: the kernel drops them under pressure, and a mapped checkpoint is nothing
// else (unlike shmem and memfd pages, which are not on the file lists). Cgroup v2 and v1.
//
// Thread-safe. `root` is put before every path, for tests with a made-up tree.

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace tandem {

struct HostMemory {
  uint64_t available_bytes = 0;
  // The file that set it: "/proc/meminfo" or a cgroup's limit file.
  std::string limited_by;
};

// UNAVAILABLE when neither meminfo nor a cgroup says anything.
absl::StatusOr<HostMemory> ReadHostMemory(const std::string& root = "");

}  // namespace tandem
