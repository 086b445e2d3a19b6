#include "expert_worker/kernels/select.h"

#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

constexpr const KernelTable* kTables[] = {&kAmxTable,        &kAvx512VbmiTable, &kAvx512Bf16Table,
                                          &kAvx512VnniTable, &kAvx512Table,     &kAvx2Table,
                                          &kRefTable};

}  // namespace

std::span<const KernelTable* const> AllKernelTables() { return kTables; }

// A table runs kernels of those it is built upon.
bool IsRunnable(const KernelTable& table, const CpuFeatures& features) {
  if (&table == &kRefTable) return true;
  if (&table == &kAvx2Table) return features.avx2;
  if (&table == &kAvx512Table) return features.avx512 && IsRunnable(kAvx2Table, features);
  if (&table == &kAvx512VnniTable) {
    return features.avx512_vnni && IsRunnable(kAvx512Table, features);
  }
  if (&table == &kAvx512Bf16Table) {
    return features.avx512_bf16 && IsRunnable(kAvx512VnniTable, features);
  }
  if (&table == &kAvx512VbmiTable) {
    return features.avx512_vbmi && IsRunnable(kAvx512Bf16Table, features);
  }
  return &table == &kAmxTable && features.amx_tile && features.amx_int8 && features.amx_bf16 &&
         IsRunnable(kAvx512VbmiTable, features);
}

const KernelTable* SelectKernelTable(Isa cap, const CpuFeatures& features) {
  for (const KernelTable* table : kTables) {
    if (table->isa <= cap && IsRunnable(*table, features)) return table;
  }
  return &kRefTable;
}

}  // namespace tandem::kernels
