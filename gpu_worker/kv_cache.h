#pragma once

// The paged key/value cache of all layers: `block_count` blocks of `block_tokens` tokens a layer,
// in the backend's memory. Which block holds what is the gateway's business; block ids are the same
// in every layer of a cache group.
//
// Thread safety: none; used by the thread that enqueues. Ownership: memory belongs to the backend,
// which must outlive the cache. Errors: RESOURCE_EXHAUSTED when the memory cannot be had.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/model_spec.h"
#include "gpu_worker/backend.h"

namespace tandem::gpu {

struct KvCacheOptions {
  int block_tokens = 16;
  int64_t tokens = 0;  // rounded up to whole blocks
  DType dtype = DType::kF32;
};

// Numbers that one token keeps in one layer.
struct CacheWidths {
  int64_t k = 0;
  int64_t v = 0;
};
CacheWidths CacheWidthsOf(const AttentionSpec& attention);

class KvCache {
 public:
  static absl::StatusOr<KvCache> Create(Backend& backend, const ModelSpec& spec,
                                        const KvCacheOptions& options);

  const PagedCache& layer(int index) const { return layers_[static_cast<size_t>(index)]; }
  int block_tokens() const { return block_tokens_; }
  int block_count() const { return block_count_; }
  uint64_t bytes() const { return bytes_; }

  // Copies whole blocks in every layer; `source` and `target` are device memory of `count` entries.
  void EnqueueCopies(Backend& backend, const int32_t* source, const int32_t* target,
                     int count) const;

 private:
  std::vector<PagedCache> layers_;
  int block_tokens_ = 0;
  int block_count_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace tandem::gpu
