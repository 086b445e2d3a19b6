#include "gpu_worker/links/row_copy.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tandem::gpu {
namespace {

// Branch-free, so that the loop over it vectorizes.
uint16_t RoundToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? quiet : rounded);
}

}  // namespace

Span ShareOf(uint64_t total, int thread, int threads, uint64_t quantum) {
  const uint64_t units = (total + quantum - 1) / quantum;
  const auto index = static_cast<uint64_t>(thread);
  const auto count = static_cast<uint64_t>(threads);
  return {std::min(units * index / count * quantum, total),
          std::min(units * (index + 1) / count * quantum, total)};
}

void PutRows(shm::RowType type, const float* from, Span span, void* to) {
  if (type == shm::RowType::kF32) {
    StoreRows(from, span, static_cast<float*>(to));
    return;
  }
  auto* out = static_cast<uint16_t*>(to);
  for (uint64_t i = span.begin; i < span.end; ++i) out[i] = RoundToBf16(from[i]);
}

void StoreRows(const float* from, Span span, float* to) {
  if (span.end <= span.begin) return;
  std::memcpy(to + span.begin, from + span.begin, (span.end - span.begin) * sizeof(float));
}

void AddRows(const float* from, Span span, float* to) {
  for (uint64_t i = span.begin; i < span.end; ++i) to[i] += from[i];
}

void ZeroRows(Span span, float* to) {
  for (uint64_t i = span.begin; i < span.end; ++i) to[i] = 0.0f;
}

}  // namespace tandem::gpu
