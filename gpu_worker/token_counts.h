#pragma once

// How often each token occurred in a sequence, in device memory, for the sampler's penalties: one
// row [vocab] a slot of the sequence table; layout of SampleArgs::token_counts.
//
// Thread safety: none. Ownership: device memory belongs to the backend; a host mirror (pages that
// no penalized sequence touched cost nothing) is the source of every upload.

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/statusor.h"
#include "gpu_worker/backend.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

class TokenCounts {
 public:
  static absl::StatusOr<TokenCounts> Create(Backend& backend, int rows, int64_t vocab);

  // Starts row `row` anew. REQUIRES: ids within the vocabulary.
  void Start(Backend& backend, int row, const worker::v1::SequenceStart& start);
  void Add(Backend& backend, int row, int32_t token);
  const uint32_t* device() const { return device_; }

 private:
  static constexpr uint32_t kInPrompt = 1u << 31;
  static constexpr uint32_t kCountMask = (1u << 24) - 1;

  struct Free {
    void operator()(uint32_t* memory) const { std::free(memory); }
  };
  uint32_t* Row(int row) const { return host_.get() + row * vocab_; }
  static void Increment(uint32_t& word) {
    if ((word & kCountMask) != kCountMask) ++word;
  }

  std::unique_ptr<uint32_t, Free> host_;
  uint32_t* device_ = nullptr;
  int64_t vocab_ = 0;
};

}  // namespace tandem::gpu
