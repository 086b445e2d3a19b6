#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/select.h"
#include "tests/expert_worker/tested_tables.h"

namespace tandem::kernels {

std::span<const KernelTable* const> TestedTables() { return AllKernelTables(); }

bool CanRun(const KernelTable& table) { return IsRunnable(table, DetectCpuFeatures()); }

}  // namespace tandem::kernels
