#pragma once

// Random weights of any format in their canonical form (codes and group parameters), for tests and
// benches of the kernels. Scales are such that values stay near one.

#include <cstdint>
#include <random>
#include <vector>

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

// Columns a scale covers where a test does not choose.
inline uint32_t UsualGroup(WeightFormat format) {
  const FormatTraits& t = TraitsOf(format);
  if (t.dot_group == 0) return format == WeightFormat::kMxfp8 ? 32 : 0;
  return t.dot_group;
}

class RandomWeights {
 public:
  RandomWeights(WeightFormat format, uint32_t group_columns, uint32_t n, uint32_t k, uint32_t seed)
      : format_(format), group_columns_(group_columns), n_(n), k_(k), rng_(seed) {
    if (IsPlain(format)) {
      FillElements();
    } else {
      FillQuantized();
    }
  }

  // The part of the matrix from (row, column) on.
  PackSource Source(uint32_t row = 0, uint32_t column = 0) const {
    PackSource source{};
    source.format = format_;
    const size_t first = size_t{row} * k_ + column;
    if (format_ == WeightFormat::kF32) {
      source.data = floats_.data() + first;
    } else if (IsPlain(format_)) {
      source.data = words_.data() + first;
    } else {
      source.quantized.codes = codes_.data() + first;
      source.quantized.code_stride = k_;
      const uint32_t group = group_columns_ == 0 ? 0 : column / group_columns_;
      source.quantized.groups = groups_.data() + size_t{row} * groups_per_row_ + group;
      source.quantized.group_stride = groups_per_row_;
      source.quantized.group_columns = group_columns_;
      source.quantized.first_column = column;
    }
    source.row_stride = k_;
    return source;
  }

 private:
  uint32_t Below(uint32_t count) { return static_cast<uint32_t>(rng_() % count); }

  void FillElements() {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (size_t i = 0; i < size_t{n_} * k_; ++i) {
      floats_.push_back(normal(rng_));
      // Sign, a magnitude between 2^-3 and 2, any mantissa.
      words_.push_back(static_cast<uint16_t>(
          Below(2) << 15 | (format_ == WeightFormat::kBf16 ? (124 + Below(4)) << 7 | Below(128)
                                                           : (12 + Below(4)) << 10 | Below(1024))));
    }
  }

  void FillQuantized() {
    const FormatTraits& t = TraitsOf(format_);
    const uint32_t codes[] = {1, 1, 1, 256, 256, 16, 32, 64, 4, 8};
    const uint32_t count = codes[static_cast<int>(t.codes)];
    for (size_t i = 0; i < size_t{n_} * k_; ++i) {
      uint32_t code = Below(count);
      if (t.codes == CodeStorage::kE4m3 && (code & 0x7F) == 0x7F) code ^= 1;  // not NaN
      codes_.push_back(static_cast<uint8_t>(code));
    }
    groups_per_row_ = group_columns_ == 0 ? 1 : (k_ + group_columns_ - 1) / group_columns_;
    for (uint32_t row = 0; row < n_; ++row) {
      uint32_t super = 0;
      for (uint32_t g = 0; g < groups_per_row_; ++g) {
        if (g * group_columns_ % kSuperBlockColumns == 0) super = RandomSuper(t.super);
        groups_.push_back({RandomScale(t.scale), RandomMin(t), super});
      }
    }
    if (t.super == SuperType::kF32Row) {
      for (GroupParameters& g : groups_) g.super = 0x3E800000;  // one a tensor: 0.25
    }
  }

  uint32_t Half() { return Below(2) << 15 | (5 + Below(4)) << 10 | Below(1024); }

  uint32_t RandomSuper(SuperType type) {
    return type == SuperType::kF16Pair ? Half() | Half() << 16
           : type == SuperType::kF16   ? Half()
                                       : 0;
  }

  uint32_t RandomScale(ScaleType type) {
    switch (type) {
      case ScaleType::kF32:
        return (118 + Below(6)) << 23 | Below(1u << 23);
      case ScaleType::kBf16:
        return (118 + Below(6)) << 7 | Below(128);
      case ScaleType::kE8m0:
        return 120 + Below(8);
      case ScaleType::kE4m3:
        return 8 + Below(64);
      case ScaleType::kU8:
        return Below(64);
      case ScaleType::kI8:
      case ScaleType::kI8Pair:
        return (Below(64) - 32) & 0xFF;
      case ScaleType::kU4Pair:
        return Below(16);
      default:
        return Half();
    }
  }

  uint32_t RandomMin(const FormatTraits& t) {
    if (t.min == MinType::kF16) return Half();
    if (t.min == MinType::kU8) return Below(64);
    if (t.min == MinType::kU4) return Below(16);
    return Below(t.codes == CodeStorage::k8 ? 256 : 17);
  }

  WeightFormat format_;
  uint32_t group_columns_;
  uint32_t n_;
  uint32_t k_;
  std::mt19937 rng_;
  uint32_t groups_per_row_ = 0;
  std::vector<float> floats_;
  std::vector<uint16_t> words_;
  std::vector<uint8_t> codes_;
  std::vector<GroupParameters> groups_;
};

}  // namespace tandem::kernels
