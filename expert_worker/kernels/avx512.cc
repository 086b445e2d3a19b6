// AVX-512 (F, BW, VL, DQ; Skylake-X and later): multiply-adds of F32. Without VNNI the integer
// formats are left to the kernels of avx2.cc.

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
#include "expert_worker/kernels/fp8_fma.inc"
#include "expert_worker/kernels/delegate.inc"
// clang-format on

template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  if constexpr (T.dot_group != 0) {
    return {T.format, ActivationForm::kInt8, T.dot_group, GemmExact<T>, GemmOf<kAvx2Table, T>};
  } else if constexpr (T.codes == CodeStorage::kE4m3) {
    return {T.format, ActivationForm::kF32, 0, GemmExact<T>, GemmFp8<T>};
  } else {
    return {T.format, ActivationForm::kF32, 0, GemmExact<T>, GemmExact<T>};
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return {Isa::kAvx512,   "avx512",        {KernelsOf<kFormats[kIndex]>()...},
          SiluMul,        ExpArray,        AddScaled,
          WidenBf16Array, NarrowBf16Array, Quantize,
          ClampedSwiglu};
}

}  // namespace

constinit const KernelTable kAvx512Table = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
