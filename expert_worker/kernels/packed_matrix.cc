#include "expert_worker/kernels/packed_matrix.h"

#include <cstdlib>
#include <utility>

#include "expert_worker/kernels/panel_layout.h"

namespace tandem::kernels {

PackedMatrix MakePackedMatrix(WeightFormat format, uint32_t group_columns, const void* data,
                              uint32_t n, uint32_t k) {
  const size_t panel_bytes = PanelBytes(format, k, group_columns);
  return {data, n, k, k, group_columns, panel_bytes, panel_bytes * PanelCount(n)};
}

OwnedMatrix OwnedMatrix::Pack(WeightFormat format, uint32_t group_columns, const PackSource& source,
                              uint32_t n, uint32_t k) {
  OwnedMatrix matrix;
  matrix.bytes_ = PanelBytes(format, k, group_columns) * PanelCount(n);
  const size_t whole = (matrix.bytes_ + kPackAlignment) / kPackAlignment * kPackAlignment;
  matrix.memory_ = std::aligned_alloc(kPackAlignment, whole);
  if (matrix.memory_ == nullptr) std::abort();
  PackPanels(format, group_columns, source, n, k, k, matrix.memory_);
  matrix.view_ = MakePackedMatrix(format, group_columns, matrix.memory_, n, k);
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
