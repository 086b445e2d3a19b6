// AVX-512 with VNNI (Cascade Lake, Ice Lake and later): integer formats by vpdpbusd, all else as
// in avx512.cc.

#include <bit>
#include <utility>

#include "expert_worker/kernels/exact_values.h"
#include "expert_worker/kernels/intrinsics.h"
#include "expert_worker/kernels/kernel_table.h"
#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

// clang-format off
#include "expert_worker/kernels/avx512_vector.inc"
#include "expert_worker/kernels/gemm_tiles.inc"
#include "expert_worker/kernels/avx512_int8.inc"
#include "expert_worker/kernels/avx512_int8_many.inc"
#include "expert_worker/kernels/delegate.inc"
// clang-format on

template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  if constexpr (T.dot_group != 0) {
    return EntryOver<kAvx512Table, T>(ActivationForm::kInt8, GemmInt8<T>);
  } else {
    return EntryOver<kAvx512Table, T>(ActivationForm::kF32);
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return TableOver<kAvx512Table>(Isa::kAvx512, "avx512_vnni", KernelsOf<kFormats[kIndex]>()...);
}

}  // namespace

constinit const KernelTable kAvx512VnniTable = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
