// AVX-512 with VNNI and BF16 (Cooper Lake and later): BF16 weights by vdpbf16ps, all else as in
// avx512_vnni.cc.

#include <utility>

#include "expert_worker/kernels/exact_values.h"
#include "expert_worker/kernels/intrinsics.h"
#include "expert_worker/kernels/kernel_table.h"
#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

// In this order: the policy, then what is written over it.
// clang-format off
#include "expert_worker/kernels/avx512_vector.inc"
#include "expert_worker/kernels/exact.inc"
#include "expert_worker/kernels/gemm_tiles.inc"
#include "expert_worker/kernels/avx512_bf16.inc"
#include "expert_worker/kernels/delegate.inc"
// clang-format on

template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  if constexpr (T.codes == CodeStorage::kBf16) {
    return EntryOver<kAvx512VnniTable, T>(ActivationForm::kBf16, GemmBf16);
  } else if constexpr (T.dot_group != 0) {
    return EntryOver<kAvx512VnniTable, T>(ActivationForm::kInt8);
  } else {
    return EntryOver<kAvx512VnniTable, T>(ActivationForm::kF32);
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return TableOver<kAvx512VnniTable>(Isa::kAvx512, "avx512_bf16", KernelsOf<kFormats[kIndex]>()...);
}

}  // namespace

constinit const KernelTable kAvx512Bf16Table = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
