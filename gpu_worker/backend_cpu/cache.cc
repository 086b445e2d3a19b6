#include <cstring>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {
namespace {

// Stores `width` elements as row `token` of a cache plane.
void StoreRow(OpContext& context, const float* from, void* plane, DType dtype, int64_t token,
              int64_t width) {
  const auto count = static_cast<size_t>(width);
  if (dtype == DType::kBF16) {
    context.kernels.narrow_bf16(from, static_cast<uint16_t*>(plane) + token * width, count);
  } else {
    std::memcpy(static_cast<float*>(plane) + token * width, from, count * sizeof(float));
  }
}

// Bytes [bytes * thread / threads, ...) of every copy, in the order of the copies, so that a block
// may be the target of one copy and the source of a later one.
void CopyPart(const BlockCopyArgs& args, void* plane, size_t block_bytes, int thread, int threads) {
  const size_t begin = block_bytes * static_cast<size_t>(thread) / static_cast<size_t>(threads);
  const size_t end = block_bytes * static_cast<size_t>(thread + 1) / static_cast<size_t>(threads);
  auto* base = static_cast<unsigned char*>(plane);
  for (int i = 0; i < args.count; ++i) {
    if (args.source[i] == args.target[i]) continue;
    std::memcpy(base + static_cast<size_t>(args.target[i]) * block_bytes + begin,
                base + static_cast<size_t>(args.source[i]) * block_bytes + begin, end - begin);
  }
}

}  // namespace

void CacheWrite(OpContext& context, const CacheWriteArgs& args) {
  const PagedCache& cache = args.cache;
  const RowPlace& place = args.place;
  TANDEM_DCHECK(cache.dtype == DType::kF32 || cache.dtype == DType::kBF16);
  context.ForEach(
      RowCount(args.rows), cache.k_width + cache.v_width, [&](int, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t position = place.positions[row];
          const int32_t* blocks =
              place.block_table + int64_t{place.sequence[row]} * place.blocks_per_sequence;
          const int64_t block = blocks[position / place.block_tokens];
          TANDEM_DCHECK(block >= 0 && block < cache.block_count);
          const int64_t token = block * place.block_tokens + position % place.block_tokens;
          StoreRow(context, args.k.data + row * args.k.ld, cache.k, cache.dtype, token,
                   cache.k_width);
          if (cache.v == nullptr) continue;
          StoreRow(context, args.v.data + row * args.v.ld, cache.v, cache.dtype, token,
                   cache.v_width);
        }
      });
}

void CopyBlocks(OpContext& context, const BlockCopyArgs& args) {
  if (args.count <= 0) return;
  const size_t token_bytes = DTypeBytes(args.cache.dtype) * static_cast<size_t>(args.block_tokens);
  const int threads = context.pool.threads();
  context.pool.Run([&](int thread) {
    CopyPart(args, args.cache.k, token_bytes * static_cast<size_t>(args.cache.k_width), thread,
             threads);
    if (args.cache.v == nullptr) return;
    CopyPart(args, args.cache.v, token_bytes * static_cast<size_t>(args.cache.v_width), thread,
             threads);
  });
}

}  // namespace tandem::gpu::cpu
