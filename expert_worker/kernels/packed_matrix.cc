#include "expert_worker/kernels/packed_matrix.h"

#include <cstdlib>
#include <utility>

namespace tandem::kernels {

PackedMatrix MakePackedMatrix(const FormatKernels& kernels, const void* data, uint32_t n,
                              uint32_t k) {
  const size_t panel_bytes = kernels.panel_bytes(k);
  return {data, n, k, k, panel_bytes, panel_bytes * PanelCount(n)};
}

OwnedMatrix OwnedMatrix::Pack(const FormatKernels& kernels, const PackSource& source, uint32_t n,
                              uint32_t k) {
  OwnedMatrix matrix;
  matrix.bytes_ = kernels.panel_bytes(k) * PanelCount(n);
  const size_t whole = (matrix.bytes_ + kPackAlignment) / kPackAlignment * kPackAlignment;
  matrix.memory_ = std::aligned_alloc(kPackAlignment, whole);
  if (matrix.memory_ == nullptr) std::abort();
  kernels.pack(source, n, k, k, matrix.memory_);
  matrix.view_ = MakePackedMatrix(kernels, matrix.memory_, n, k);
  return matrix;
}

OwnedMatrix::~OwnedMatrix() { std::free(memory_); }

OwnedMatrix::OwnedMatrix(OwnedMatrix&& other) noexcept { *this = std::move(other); }

OwnedMatrix& OwnedMatrix::operator=(OwnedMatrix&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  std::swap(view_, other.view_);
  return *this;
}

}  // namespace tandem::kernels
