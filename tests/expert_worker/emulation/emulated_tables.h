#pragma once

// The tables of avx512.cc, avx512_vnni.cc and amx.cc, compiled against emulated intrinsics.

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

extern const KernelTable kEmulatedAvx512Table;
extern const KernelTable kEmulatedAvx512VnniTable;
extern const KernelTable kEmulatedAmxTable;

}  // namespace tandem::kernels
