#pragma once

// The kernel tables that an executable of the kernel tests runs over: the shipped ones, or the
// AVX-512 and AMX ones compiled a second time against emulated intrinsics. Each executable links
// one of shipped_tables.cc and emulation/emulated_tables.cc.

#include <span>

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

std::span<const KernelTable* const> TestedTables();

// Whether this machine runs the instructions of `table`, one of the above.
bool CanRun(const KernelTable& table);

}  // namespace tandem::kernels
