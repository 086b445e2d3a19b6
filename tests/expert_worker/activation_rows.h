#pragma once

// Activations in the form that a format's fast kernel wants, with the gaps between chunks that
// kernel_table.h describes. Owns its memory; for tests and benches.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

class ActivationRows {
 public:
  // x [rows, k]; the weights' k_chunk.
  ActivationRows(const KernelTable& table, WeightFormat format, const std::vector<float>& x,
                 uint32_t rows, uint32_t k, uint32_t k_chunk)
      : kernels_(table.format(format)), x_(x), k_(k) {
    const size_t padded = RoundUpTo(k_chunk, kStepAlign);
    stride_ = (k + k_chunk - 1) / k_chunk * padded;
    const uint32_t group = kernels_.dot_group == 0 ? kStepAlign : kernels_.dot_group;
    groups_ = stride_ / group;
    std::vector<float> spread(stride_);
    bf16_.resize(rows * stride_);
    q_.resize(rows * stride_);
    scale_.resize(rows * groups_);
    scaled_sum_.resize(rows * groups_);
    sum_.resize(rows * groups_);
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t j = 0; j < k; ++j) {
        spread[j / k_chunk * padded + j % k_chunk] = x[size_t{r} * k + j];
      }
      table.narrow_bf16(spread.data(), bf16_.data() + r * stride_, stride_);
      if (kernels_.dot_group == 0) continue;
      for (size_t at = 0; at < stride_; at += padded) {
        const size_t first = r * groups_ + at / group;
        table.quantize(spread.data() + at, padded, format, q_.data() + r * stride_ + at,
                       scale_.data() + first, scaled_sum_.data() + first, sum_.data() + first);
      }
    }
  }

  void Fill(GemmCall& call) const {
    call.x = x_.data();
    call.x_stride = k_;
    call.bf16 = bf16_.data();
    call.bf16_stride = stride_;
    call.int8 = {q_.data(), scale_.data(), scaled_sum_.data(), sum_.data(), stride_, groups_};
  }

  // Of the int8 groups of a row.
  float LargestScale(uint32_t row) const {
    const auto first = scale_.begin() + row * groups_;
    return *std::max_element(first, first + groups_);
  }

  // The value that the kernel sees of input j (position j of a chunkless row).
  float Value(uint32_t row, size_t at) const {
    if (kernels_.form == ActivationForm::kBf16) {
      const uint32_t bits = uint32_t{bf16_[row * stride_ + at]} << 16;
      float value;
      __builtin_memcpy(&value, &bits, sizeof(value));
      return value;
    }
    if (kernels_.form == ActivationForm::kInt8) {
      return scale_[row * groups_ + at / kernels_.dot_group] *
             static_cast<float>(q_[row * stride_ + at]);
    }
    return x_[size_t{row} * k_ + at];
  }

 private:
  const FormatKernels& kernels_;
  const std::vector<float>& x_;
  uint32_t k_;
  size_t stride_ = 0;
  size_t groups_ = 0;
  std::vector<uint16_t> bf16_;
  std::vector<int8_t> q_;
  std::vector<float> scale_;
  std::vector<float> scaled_sum_;
  std::vector<int32_t> sum_;
};

}  // namespace tandem::kernels
