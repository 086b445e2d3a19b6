#pragma once

// What may enter the queue: bounds on requests and prompt tokens that wait for their first step,
// and whether a request can ever run at all.
//
// Thread safety: none; the owner locks. Errors name the limit and the figure that exceeds it.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gateway/scheduling/kv_blocks.h"

namespace tandem::gateway {

struct QueueLimits {
  uint32_t max_requests = 0;
  uint64_t max_tokens = 0;
};

class Admission {
 public:
  explicit Admission(QueueLimits limits) : limits_(limits) {}

  // RESOURCE_EXHAUSTED if the queue is full. A prompt longer than all of max_tokens is let in when
  // nobody else waits.
  absl::Status TryEnter(uint64_t prompt_tokens);
  // The request started or ended.
  void Leave(uint64_t prompt_tokens);

  uint32_t requests() const { return requests_; }
  uint64_t tokens() const { return tokens_; }

 private:
  QueueLimits limits_;
  uint32_t requests_ = 0;
  uint64_t tokens_ = 0;
};

struct CapacityLimits {
  uint32_t max_context_tokens = 0;
  std::vector<BlockGroup> groups;
};

// Tokens that one sequence can have: the context, or the KV cache where that is smaller.
uint32_t UsableContext(const CapacityLimits& limits);

// INVALID_ARGUMENT, with the numbers, if prompt and max_tokens exceed the context or the whole KV
// cache: waiting would not help, so it is no overload.
absl::Status CheckFits(const CapacityLimits& limits, uint64_t prompt_tokens, uint64_t max_tokens);

}  // namespace tandem::gateway
