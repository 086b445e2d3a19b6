#pragma once

// The panel layout of the plain formats, shared by every table (see kernel_table.h).
//   F32:  step j of a panel is 32 floats, output o at [o].
//   BF16: step j is 16 dwords; dword i holds output i in its low and output i + 16 in its high
//   half,
//         so that one shift and one mask expand it, without a shuffle.
// Pure functions, baseline instruction set.

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

inline constexpr uint32_t kLayoutF32Panel32 = 0x46503031;   // "10PF"
inline constexpr uint32_t kLayoutBf16Panel32 = 0x42503031;  // "10PB"

size_t PanelBytesF32(uint32_t k);
void PackF32(const PackSource& source, uint32_t n, uint32_t k, uint32_t k_chunk, void* panels);
void UnpackF32(const PackedMatrix& w, float* out);

size_t PanelBytesBf16(uint32_t k);
void PackBf16(const PackSource& source, uint32_t n, uint32_t k, uint32_t k_chunk, void* panels);
void UnpackBf16(const PackedMatrix& w, float* out);

}  // namespace tandem::kernels
