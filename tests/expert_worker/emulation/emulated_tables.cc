#include "tests/expert_worker/emulation/emulated_tables.h"

#include "common/hw/cpu_features.h"
#include "tests/expert_worker/tested_tables.h"

namespace tandem::kernels {
namespace {

constexpr const KernelTable* kTables[] = {&kEmulatedAmxTable, &kEmulatedAvx512VbmiTable,
                                          &kEmulatedAvx512Bf16Table, &kEmulatedAvx512VnniTable,
                                          &kEmulatedAvx512Table};

}  // namespace

std::span<const KernelTable* const> TestedTables() { return kTables; }

// The emulation is compiled for AVX2, FMA and F16C, so that it takes seconds.
bool CanRun(const KernelTable&) { return DetectCpuFeatures().avx2; }

}  // namespace tandem::kernels
