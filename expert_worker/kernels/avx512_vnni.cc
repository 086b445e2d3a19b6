// AVX-512 with VNNI, BF16 and VBMI (Zen 4, Sapphire Rapids and later): the exact kernels of
// avx512.cc, and fast ones for integer, BF16 and E4M3 weights.

#include <bit>
#include <utility>

#include "expert_worker/kernels/exact_values.h"
#include "expert_worker/kernels/exp_constants.h"
#include "expert_worker/kernels/intrinsics.h"
#include "expert_worker/kernels/kernel_table.h"
#include "expert_worker/kernels/quantize.h"
#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

// In this order: the policy, then what is written over it.
// clang-format off
#include "expert_worker/kernels/avx512_vector.inc"
#include "expert_worker/kernels/exact.inc"
#include "expert_worker/kernels/elementwise.inc"
#include "expert_worker/kernels/gemm_tiles.inc"
#include "expert_worker/kernels/avx512_int8.inc"
#include "expert_worker/kernels/avx512_bf16.inc"
// clang-format on

template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  if constexpr (T.dot_group != 0) {
    return {T.format, ActivationForm::kInt8, T.dot_group, GemmExact<T>, GemmInt8<T>};
  } else if constexpr (T.codes == CodeStorage::kE4m3) {
    return {T.format, ActivationForm::kBf16, 0, GemmExact<T>, GemmFp8<T>};
  } else if constexpr (T.codes == CodeStorage::kBf16) {
    return {T.format, ActivationForm::kBf16, 0, GemmExact<T>, GemmBf16};
  } else {
    return {T.format, ActivationForm::kF32, 0, GemmExact<T>, GemmExact<T>};
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return {Isa::kAvx512,   "avx512_vnni",   {KernelsOf<kFormats[kIndex]>()...},
          SiluMul,        ExpArray,        AddScaled,
          WidenBf16Array, NarrowBf16Array, Quantize,
          ClampedSwiglu};
}

}  // namespace

constinit const KernelTable kAvx512VnniTable = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
