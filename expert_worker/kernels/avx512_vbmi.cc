// AVX-512 with VNNI, BF16 and VBMI (Zen 4, Sapphire Rapids and later): E4M3 weights by vdpbf16ps,
// which byte permutes of two registers decode; all else as in avx512_bf16.cc.

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
  if constexpr (T.codes == CodeStorage::kE4m3) {
    return EntryOver<kAvx512Bf16Table, T>(ActivationForm::kBf16, GemmFp8<T>);
  } else if constexpr (T.codes == CodeStorage::kBf16) {
    return EntryOver<kAvx512Bf16Table, T>(ActivationForm::kBf16);
  } else if constexpr (T.dot_group != 0) {
    return EntryOver<kAvx512Bf16Table, T>(ActivationForm::kInt8);
  } else {
    return EntryOver<kAvx512Bf16Table, T>(ActivationForm::kF32);
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return TableOver<kAvx512Bf16Table>(Isa::kAvx512, "avx512_vbmi", KernelsOf<kFormats[kIndex]>()...);
}

}  // namespace

constinit const KernelTable kAvx512VbmiTable = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
