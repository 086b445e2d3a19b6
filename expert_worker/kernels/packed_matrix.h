#pragma once

// A packed weight matrix that owns its memory, for callers that keep whole linears (gpu_worker's
// CPU backend, tests, benches). Experts live in a weight store instead. Movable, not copyable;
// read-only after Pack, hence safe to share between threads.

#include <cstddef>
#include <cstdint>

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

constexpr uint32_t PanelCount(uint32_t n) { return (n + kPanelWidth - 1) / kPanelWidth; }

// Row stride in floats that keeps rows apart in the L1 cache: rows a multiple of 4 KiB apart share
// one set of 8 lines, so 12 rows walked in step would evict each other.
constexpr size_t ActivationStride(size_t columns) {
  const size_t whole = (columns + 15) / 16 * 16;
  return whole % 1024 == 0 ? whole + 16 : whole;
}

// View of panels that were packed with k_chunk = k at `data`.
PackedMatrix MakePackedMatrix(WeightFormat format, uint32_t group_columns, const void* data,
                              uint32_t n, uint32_t k);

class OwnedMatrix {
 public:
  OwnedMatrix() = default;
  ~OwnedMatrix();
  OwnedMatrix(OwnedMatrix&& other) noexcept;
  OwnedMatrix& operator=(OwnedMatrix&& other) noexcept;

  // Packs [n, k] of `source`. Aborts when memory is exhausted (planned before loading).
  static OwnedMatrix Pack(WeightFormat format, uint32_t group_columns, const PackSource& source,
                          uint32_t n, uint32_t k);

  const PackedMatrix& view() const { return view_; }
  size_t bytes() const { return bytes_; }
  bool empty() const { return memory_ == nullptr; }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  PackedMatrix view_{};
};

}  // namespace tandem::kernels
