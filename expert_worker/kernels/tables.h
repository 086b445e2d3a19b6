#pragma once

// One table an ISA file, in no particular order; select.h picks. Constant-initialized plain data.

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

extern const KernelTable kRefTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512VnniTable;
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kAvx512VbmiTable;
extern const KernelTable kAmxTable;

}  // namespace tandem::kernels
