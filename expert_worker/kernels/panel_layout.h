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

}  // namespace tandem::kernels
