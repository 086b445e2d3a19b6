#pragma once

// One routed expert's weights in canonical form: what a checkpoint says of them, free of anyone's
// packed layout. Packed layouts are unpacked to it and devices load from it, so that neither knows
// the other's. Plain data.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/tensor/weight_format.h"

namespace tandem {

// A matrix of experts: one format for all experts of a layer.
struct MatrixFormat {
  WeightFormat format = WeightFormat::kBf16;
  uint32_t group_columns = 0;  // 0 for plain formats, and for one scale a row
  bool operator==(const MatrixFormat&) const = default;
};
struct LayerFormat {
  MatrixFormat gate_up;
  MatrixFormat down;
  bool operator==(const LayerFormat&) const = default;
};

constexpr size_t ElementBytes(WeightFormat format) {
  if (format == WeightFormat::kF32) return 4;
  return format == WeightFormat::kBf16 || format == WeightFormat::kF16 ? 2 : 1;
}

// Row-major without gaps.
struct CanonicalMatrix {
  MatrixFormat format;
  uint32_t rows = 0;
  uint32_t columns = 0;
  std::vector<uint8_t> elements;        // of the plain type, or one code a byte
  std::vector<GroupParameters> groups;  // [rows, groups_per_row()]; empty for plain formats

  uint32_t groups_per_row() const {
    return IsPlain(format.format) ? 0 : GroupsTouched(0, columns, format.group_columns);
  }
  // Memory is kept for the next, so that a series of experts allocates once.
  void Reshape(const MatrixFormat& new_format, uint32_t new_rows, uint32_t new_columns) {
    format = new_format;
    rows = new_rows;
    columns = new_columns;
    elements.resize(size_t{rows} * columns * ElementBytes(format.format));
    groups.resize(size_t{rows} * groups_per_row());
  }
  QuantizedView quantized() const {
    return {elements.data(), columns, groups.data(), groups_per_row(), format.group_columns, 0};
  }
};

struct CanonicalExpert {
  CanonicalMatrix gate_up;          // [2 * intermediate, hidden]: gate rows, then up rows
  CanonicalMatrix down;             // [hidden, intermediate]
  std::vector<float> gate_up_bias;  // [2 * intermediate], or empty
  std::vector<float> down_bias;     // [hidden], or empty
};

}  // namespace tandem
