// AVX-512 (F, BW, VL, DQ): a panel of 32 outputs is two vectors.

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
// clang-format on

template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  return {T.format, ActivationForm::kF32, 0, GemmExact<T>, GemmExact<T>};
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
