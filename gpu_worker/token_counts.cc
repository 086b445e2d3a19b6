#include "gpu_worker/token_counts.h"

#include <algorithm>

#include "common/base/status.h"

namespace tandem::gpu {

absl::StatusOr<TokenCounts> TokenCounts::Create(Backend& backend, int rows, int64_t vocab) {
  TokenCounts counts;
  counts.vocab_ = vocab;
  const size_t words = static_cast<size_t>(rows) * static_cast<size_t>(vocab);
  // calloc: large zeroed memory comes from untouched pages.
  counts.host_.reset(static_cast<uint32_t*>(std::calloc(words, sizeof(uint32_t))));
  if (counts.host_ == nullptr) {
    return absl::ResourceExhaustedError("no memory for the token counts of penalties");
  }
  ASSIGN_OR_RETURN(void* device, backend.Allocate(words * sizeof(uint32_t)));
  counts.device_ = static_cast<uint32_t*>(device);
  return counts;
}

void TokenCounts::Start(Backend& backend, int row, const worker::v1::SequenceStart& start) {
  uint32_t* counts = Row(row);
  std::fill(counts, counts + vocab_, 0);
  for (const uint32_t token : start.penalty_prompt_ids()) counts[token] |= kInPrompt;
  for (const uint32_t token : start.penalty_output_ids()) Increment(counts[token]);
  backend.CopyToDevice(device_ + row * vocab_, counts,
                       static_cast<size_t>(vocab_) * sizeof(uint32_t));
}

void TokenCounts::Add(Backend& backend, int row, int32_t token) {
  uint32_t* word = Row(row) + token;
  Increment(*word);
  backend.CopyToDevice(device_ + row * vocab_ + token, word, sizeof(uint32_t));
}

}  // namespace tandem::gpu
