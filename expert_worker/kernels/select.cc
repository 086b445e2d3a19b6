#include "expert_worker/kernels/select.h"

#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

constexpr const KernelTable* kTables[] = {&kAmxTable, &kAvx512VnniTable, &kAvx512Table, &kAvx2Table,
                                          &kRefTable};

}  // namespace

std::span<const KernelTable* const> AllKernelTables() { return kTables; }

bool IsRunnable(const KernelTable& table, const CpuFeatures& features) {
  if (&table == &kAvx512VnniTable) {
    return features.avx512_vnni && features.avx512_bf16 && features.avx512_vbmi;
  }
  switch (table.isa) {
    case Isa::kRef:
      return true;
    case Isa::kAvx2:
      return features.avx2;
    case Isa::kAvx512:
      return features.avx512;
    case Isa::kAmx:
      return features.amx_tile && features.amx_int8 && features.amx_bf16 &&
             IsRunnable(kAvx512VnniTable, features);
  }
  return false;
}

const KernelTable* SelectKernelTable(Isa cap, const CpuFeatures& features) {
  for (const KernelTable* table : kTables) {
    if (table->isa <= cap && IsRunnable(*table, features)) return table;
  }
  return &kRefTable;
}

}  // namespace tandem::kernels
