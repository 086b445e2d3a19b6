#pragma once

// On which NUMA node the pages of a shared file (memfd, tmpfs, hugetlbfs) lie. A preference is kept
// by the file itself, so it holds for every later mapping, whoever writes the pages first. It is a
// preference, not a binding: where the node is full, loading goes on with far pages, and
// SamplePlacement shows how many.
//
// Containers often forbid the policy calls. Then first touch decides, which gives the same result
// when the writing threads sit on the node's CPUs.
//
// Thread-safe. Sizes in bytes; a page is the kernel's base page, also within huge ones.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

// The kernel's policy calls; tests stand in for them. Results: 0 or an errno.
class NumaPolicy {
 public:
  virtual ~NumaPolicy() = default;
  // Nodes with memory that this process may use (cpuset), ascending. Empty: unknown.
  virtual std::vector<int> AllowedNodes() const = 0;
  virtual int Prefer(void* base, size_t bytes, int node) const = 0;
  // nodes[i]: the node of pages[i], or a negative errno where it has none yet.
  virtual int NodesOf(std::span<void* const> pages, std::span<int> nodes) const = 0;
};

class KernelNumaPolicy final : public NumaPolicy {
 public:
  std::vector<int> AllowedNodes() const override;
  int Prefer(void* base, size_t bytes, int node) const override;
  int NodesOf(std::span<void* const> pages, std::span<int> nodes) const override;
};

// Pages of `fd` below `bytes` that are yet to be written shall lie on `node`. `bytes` may exceed
// the file. OK without a call where there is one node only. Errors: FAILED_PRECONDITION for a node
// outside of the allowed ones, PERMISSION_DENIED when the call is refused, RESOURCE_EXHAUSTED.
absl::Status PreferNode(int fd, size_t bytes, int node, const NumaPolicy& policy);

struct PlacementSample {
  uint64_t pages = 0;      // looked at
  uint64_t misplaced = 0;  // of them on another node
};

// Looks at up to `max_pages` pages, evenly spread over the file; faults them in. REQUIRES: nobody
// truncates the file meanwhile. Errors: PERMISSION_DENIED when the call is refused,
// RESOURCE_EXHAUSTED.
absl::StatusOr<PlacementSample> SamplePlacement(int fd, size_t max_pages, int node,
                                                const NumaPolicy& policy);

}  // namespace tandem
