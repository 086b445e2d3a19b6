#pragma once

// The NUMA policy calls of a machine that is not here: several nodes, pages that lie as told, calls
// that are refused. Not thread-safe.

#include <span>
#include <vector>

#include "common/hw/numa_placement.h"

namespace tandem::testing {

class FakeNumaPolicy final : public NumaPolicy {
 public:
  std::vector<int> AllowedNodes() const override { return allowed; }
  int Prefer(void*, size_t bytes, int node) const override {
    preferred_bytes = bytes;
    preferred_node = node;
    return error;
  }
  int NodesOf(std::span<void* const> pages, std::span<int> nodes) const override {
    asked.assign(pages.begin(), pages.end());
    for (size_t i = 0; i < nodes.size(); ++i) nodes[i] = layout[i % layout.size()];
    return error;
  }

  std::vector<int> allowed = {0, 1};
  std::vector<int> layout = {0, 1};  // nodes of the pages asked for, in turn
  int error = 0;                     // of every call
  mutable size_t preferred_bytes = 0;
  mutable int preferred_node = -1;
  mutable std::vector<void*> asked;
};

}  // namespace tandem::testing
