#pragma once

// Run-time dispatch: a best-first list of kernel tables, chosen from once at start. Pure and
// thread-safe.

#include <span>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::kernels {

// Every table of this build, best first; the last one is ref.
std::span<const KernelTable* const> AllKernelTables();

// Whether `features` run the instructions of `table`.
bool IsRunnable(const KernelTable& table, const CpuFeatures& features);

// The best table within `cap` whose instructions are present. Never null: ref always runs.
const KernelTable* SelectKernelTable(Isa cap, const CpuFeatures& features);

}  // namespace tandem::kernels
