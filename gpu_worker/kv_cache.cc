#include "gpu_worker/kv_cache.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace tandem::gpu {

CacheWidths CacheWidthsOf(const AttentionSpec& attention) {
  if (attention.kind == AttentionKind::kMla) {
    return {.k = attention.kv_lora_rank + attention.rope_dim, .v = 0};
  }
  const int64_t width = int64_t{attention.kv_heads} * attention.head_dim;
  return {.k = width, .v = width};
}

absl::StatusOr<KvCache> KvCache::Create(Backend& backend, const ModelSpec& spec,
                                        const KvCacheOptions& options) {
  if (options.block_tokens <= 0 || options.tokens <= 0) {
    return absl::InvalidArgumentError("the KV cache needs at least one block");
  }
  const int64_t blocks = (options.tokens + options.block_tokens - 1) / options.block_tokens;
  if (blocks > std::numeric_limits<int32_t>::max() / options.block_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("a KV cache of ", options.tokens, " tokens is beyond 31-bit token indices"));
  }
  KvCache cache;
  cache.block_tokens_ = options.block_tokens;
  cache.block_count_ = static_cast<int>(blocks);
  const CacheWidths widths = CacheWidthsOf(spec.attention);
  const size_t token_slots = static_cast<size_t>(blocks) * options.block_tokens;
  const size_t k_bytes = token_slots * widths.k * DTypeBytes(options.dtype);
  const size_t v_bytes = token_slots * widths.v * DTypeBytes(options.dtype);
  cache.layers_.reserve(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    PagedCache layer{.dtype = options.dtype,
                     .block_count = cache.block_count_,
                     .k_width = widths.k,
                     .v_width = widths.v};
    ASSIGN_OR_RETURN(layer.k, backend.Allocate(k_bytes));
    if (v_bytes > 0) {
      ASSIGN_OR_RETURN(layer.v, backend.Allocate(v_bytes));
    }
    cache.layers_.push_back(layer);
    cache.bytes_ += k_bytes + v_bytes;
  }
  return cache;
}

void KvCache::EnqueueCopies(Backend& backend, const int32_t* source, const int32_t* target,
                            int count) const {
  for (const PagedCache& layer : layers_) {
    backend.CopyBlocks({.cache = layer,
                        .block_tokens = block_tokens_,
                        .count = count,
                        .source = source,
                        .target = target});
  }
}

}  // namespace tandem::gpu
