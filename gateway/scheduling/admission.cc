#include "gateway/scheduling/admission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"

namespace tandem::gateway {
namespace {

// The keys and values of the last generated token are never needed, so a cache of n tokens carries
// a sequence of n + 1.
uint64_t CacheTokens(const CapacityLimits& limits) {
  uint64_t tokens = UINT32_MAX;
  for (const BlockGroup& group : limits.groups) {
    tokens = std::min(tokens, uint64_t{group.block_tokens} * group.block_count);
  }
  return tokens + 1;
}

}  // namespace

absl::Status Admission::TryEnter(uint64_t prompt_tokens) {
  if (requests_ >= limits_.max_requests) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", requests_,
                                                     " requests wait (limit ", limits_.max_requests,
                                                     "); try again later"));
  }
  if (requests_ > 0 && tokens_ + prompt_tokens > limits_.max_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", tokens_, " prompt tokens wait and this request has ",
                     prompt_tokens, " (limit ", limits_.max_tokens, "); try again later"));
  }
  ++requests_;
  tokens_ += prompt_tokens;
  return absl::OkStatus();
}

void Admission::Leave(uint64_t prompt_tokens) {
  TANDEM_CHECK(requests_ > 0 && tokens_ >= prompt_tokens);
  --requests_;
  tokens_ -= prompt_tokens;
}

uint32_t UsableContext(const CapacityLimits& limits) {
  return static_cast<uint32_t>(std::min<uint64_t>(limits.max_context_tokens, CacheTokens(limits)));
}

absl::Status CheckFits(const CapacityLimits& limits, uint64_t prompt_tokens, uint64_t max_tokens) {
  const uint64_t tokens = prompt_tokens + max_tokens;
  if (tokens > limits.max_context_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt (", prompt_tokens, " tokens) and max_tokens (", max_tokens,
                     ") exceed the context of ", limits.max_context_tokens, " tokens"));
  }
  if (tokens > CacheTokens(limits)) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt (", prompt_tokens, " tokens) and max_tokens (", max_tokens,
                     ") can never fit the KV cache of ", CacheTokens(limits), " tokens"));
  }
  return absl::OkStatus();
}

}  // namespace tandem::gateway
