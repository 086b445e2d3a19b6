#pragma once

// Rows of activations in the form that a format's fast kernel multiplies (kernel_table.h), in
// memory of the caller's: a view, made anew for each layer. Different threads may store different
// parts of a row at once. Units: elements, unless said otherwise.

#include <cstddef>
#include <cstdint>

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::expert {

class FormRows {
 public:
  // Inputs of a chunk take this many columns: the forms other than F32 pad them.
  static uint32_t ChunkColumns(const kernels::FormatKernels& kernels, uint32_t k_chunk);
  // Memory for `rows` rows of `columns`, a multiple of 64.
  static size_t Bytes(const kernels::FormatKernels& kernels, uint32_t columns, size_t rows);

  // `memory`: aligned to 64, of Bytes().
  FormRows(const kernels::KernelTable& table, const kernels::FormatKernels& kernels,
           uint32_t columns, size_t rows, void* memory);

  // Columns [column, column + n) of a row. In the forms other than F32, n and column are multiples
  // of kStepAlign; the caller puts zeros into what pads a chunk.
  void Store(size_t row, uint32_t column, const float* x, uint32_t n) const;

  // Points the call at the rows from `first` on.
  void Fill(size_t first, kernels::GemmCall* call) const;

  kernels::ActivationForm form() const { return kernels_->form; }
  uint16_t* bf16_row(size_t row) const { return bf16_ + row * stride_; }
  size_t row_bytes() const;

 private:
  const kernels::KernelTable* table_;
  const kernels::FormatKernels* kernels_;
  size_t stride_;            // elements of the form
  size_t group_stride_ = 0;  // of the three below
  float* f32_ = nullptr;
  uint16_t* bf16_ = nullptr;
  int8_t* q_ = nullptr;
  float* scale_ = nullptr;
  float* scaled_sum_ = nullptr;
  int32_t* sum_ = nullptr;
};

}  // namespace tandem::expert
