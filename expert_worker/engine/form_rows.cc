#include "expert_worker/engine/form_rows.h"

#include <cstring>

namespace tandem::expert {
namespace {

using kernels::ActivationForm;
using kernels::FormatKernels;
using kernels::RoundUpTo;

size_t ElementBytes(ActivationForm form) {
  return form == ActivationForm::kF32 ? 4 : form == ActivationForm::kBf16 ? 2 : 1;
}

// An odd number of cache lines: rows whose distance is a power of two share a few sets of the L1
// cache, and a kernel walks a dozen of them in step.
size_t StrideOf(const FormatKernels& kernels, uint32_t columns) {
  const size_t lines = RoundUpTo(columns * ElementBytes(kernels.form), 64) / 64;
  return (lines | 1) * 64 / ElementBytes(kernels.form);
}

size_t GroupStrideOf(const FormatKernels& kernels, uint32_t columns) {
  return kernels.form == ActivationForm::kInt8 ? RoundUpTo(columns / kernels.dot_group, 16) : 0;
}

}  // namespace

uint32_t FormRows::ChunkColumns(const FormatKernels& kernels, uint32_t k_chunk) {
  if (kernels.form == ActivationForm::kF32) return k_chunk;
  return static_cast<uint32_t>(RoundUpTo(k_chunk, kernels::kStepAlign));
}

size_t FormRows::Bytes(const FormatKernels& kernels, uint32_t columns, size_t rows) {
  return rows * (StrideOf(kernels, columns) * ElementBytes(kernels.form) +
                 GroupStrideOf(kernels, columns) * 3 * sizeof(float));
}

FormRows::FormRows(const kernels::KernelTable& table, const FormatKernels& kernels,
                   uint32_t columns, size_t rows, void* memory)
    : table_(&table),
      kernels_(&kernels),
      stride_(StrideOf(kernels, columns)),
      group_stride_(GroupStrideOf(kernels, columns)) {
  switch (kernels.form) {
    case ActivationForm::kF32:
      f32_ = static_cast<float*>(memory);
      break;
    case ActivationForm::kBf16:
      bf16_ = static_cast<uint16_t*>(memory);
      break;
    case ActivationForm::kInt8:
      q_ = static_cast<int8_t*>(memory);
      scale_ = reinterpret_cast<float*>(q_ + rows * stride_);
      scaled_sum_ = scale_ + rows * group_stride_;
      sum_ = reinterpret_cast<int32_t*>(scaled_sum_ + rows * group_stride_);
      break;
  }
}

void FormRows::Store(size_t row, uint32_t column, const float* x, uint32_t n) const {
  switch (kernels_->form) {
    case ActivationForm::kF32:
      std::memcpy(f32_ + row * stride_ + column, x, n * sizeof(float));
      break;
    case ActivationForm::kBf16:
      table_->narrow_bf16(x, bf16_ + row * stride_ + column, n);
      break;
    case ActivationForm::kInt8: {
      const size_t group = row * group_stride_ + column / kernels_->dot_group;
      table_->quantize(x, n, kernels_->format, q_ + row * stride_ + column, scale_ + group,
                       scaled_sum_ + group, sum_ + group);
      break;
    }
  }
}

void FormRows::Fill(size_t first, kernels::GemmCall* call) const {
  switch (kernels_->form) {
    case ActivationForm::kF32:
      call->x = f32_ + first * stride_;
      call->x_stride = stride_;
      break;
    case ActivationForm::kBf16:
      call->bf16 = bf16_ + first * stride_;
      call->bf16_stride = stride_;
      break;
    case ActivationForm::kInt8: {
      const size_t group = first * group_stride_;
      call->int8 = {q_ + first * stride_, scale_ + group, scaled_sum_ + group,
                    sum_ + group,         stride_,        group_stride_};
      break;
    }
  }
}

size_t FormRows::row_bytes() const {
  return stride_ * ElementBytes(kernels_->form) + group_stride_ * 3 * sizeof(float);
}

}  // namespace tandem::expert
