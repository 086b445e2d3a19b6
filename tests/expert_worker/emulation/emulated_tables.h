#pragma once

// The tables of the AVX-512 files and of amx.cc, compiled against emulated intrinsics.

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

extern const KernelTable kEmulatedAvx512Table;
extern const KernelTable kEmulatedAvx512VnniTable;
extern const KernelTable kEmulatedAvx512Bf16Table;
extern const KernelTable kEmulatedAvx512VbmiTable;
extern const KernelTable kEmulatedAmxTable;

}  // namespace tandem::kernels
