// The copying that both ends of a link submission need on the gpu worker's side: rows into the
// link's element type, partial sums out of it, each thread a share. Pure loops; thread-safe as long
// as the shares do not overlap.
#pragma once

#include <cstdint>

#include "common/shm/expert_batch.h"

namespace tandem::gpu {

struct Span {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Thread's share of [0, total), cut at multiples of `quantum` so that two threads never write one
// cache line. Decode has one row and many threads: elements are shared out, not rows.
Span ShareOf(uint64_t total, int thread, int threads, uint64_t quantum);

// Elements of 128 bytes of BF16.
inline constexpr uint64_t kElementQuantum = 64;

// to[i] = from[i] for i in span, rounded to nearest even when the link carries BF16 (NaN stays
// NaN).
void PutRows(shm::RowType type, const float* from, Span span, void* to);

// to[i] = from[i], or to[i] += from[i].
void StoreRows(const float* from, Span span, float* to);
void AddRows(const float* from, Span span, float* to);
void ZeroRows(Span span, float* to);

}  // namespace tandem::gpu
