#pragma once

// Packing into the panels of formats.h and back, for every format; the same for every table.
// Pure functions, baseline instruction set.

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

// Names the packed layout of a format; stored in manifests and compared before packed bytes are
// used.
uint32_t LayoutTag(WeightFormat format);

// Bytes of one panel of `k` inputs; a multiple of kPackAlignment.
size_t PanelBytes(WeightFormat format, uint32_t k, uint32_t group_columns);

// Packs [n, k] of `source` as `format` into CeilDiv(n, kPanelWidth) panels of
// PanelBytes(format, k_chunk, group_columns) each, k <= k_chunk; what is not covered is zero.
void PackPanels(WeightFormat format, uint32_t group_columns, const PackSource& source, uint32_t n,
                uint32_t k, uint32_t k_chunk, void* panels);

// The inverse, exact: out[n, k] F32, row-major, dense.
void UnpackPanels(WeightFormat format, const PackedMatrix& w, float* out);

// Where codes and parameters go that were packed: the inverse of what PackSource describes.
struct UnpackTarget {
  void* elements;     // of the plain format, or one code a byte
  size_t row_stride;  // elements between two rows
  // Of quantized formats: [rows, group_stride], by the group's absolute number.
  GroupParameters* groups;
  size_t group_stride;
  uint32_t first_column;  // absolute column of w's first input
};

// Rows [row_begin, row_end) of `w` to rows 0 and on of the target, bit by bit what was packed.
// Elements go to the columns from the target's first on; parameters to the place of their group of
// w.group_columns absolute columns, of which several chunks may hold equal copies.
void UnpackRows(WeightFormat format, const PackedMatrix& w, uint32_t row_begin, uint32_t row_end,
                const UnpackTarget& target);

}  // namespace tandem::kernels
