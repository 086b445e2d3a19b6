// AMX (Sapphire Rapids and later): the kernels of avx512_vbmi.cc, and tiles where a call has 16
// rows or more. Rows beyond a multiple of 16 go to the vector kernels.
//
// Arithmetic of the tiles, by format; activations come in the forms of avx512_vbmi.cc:
//   BF16, E4M3     BF16 products, F32 sums; the values are exact, as in the vector kernels.
//   integers, long groups (of 128 inputs, or of 256 and more, or whole rows)
//                  int8 products. Activations of a span (a group, at most 256 inputs) are rounded
//                  again, to the span's largest scale S: within S / 2 of what is given.
//   integers, short groups
//                  BF16 products of q * scale and of the weight's value, each rounded to BF16:
//                  each product within 2^-8 (2^-9 + 2^-9) of itself. Sums in 32-bit integers would
//                  have to leave the tiles after every 32 inputs, half a tile: at most half of the
//                  useful multiply-adds, and 32 loads, conversions and stores beside 16 cycles.
// So a row's sums depend on whether it is among the tiles; never on the values of other rows.
//
// The tile configuration is loaded at each call and released at its end: some hundred cycles beside
// ten thousand and more of the least call, and a thread that holds tiles adds 8 KiB to every
// context switch and keeps its core from deep sleep.

#include <bit>
#include <utility>

#include "expert_worker/kernels/amx_tiles.h"
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
#include "expert_worker/kernels/avx512_int8.inc"
#include "expert_worker/kernels/avx512_bf16.inc"
#include "expert_worker/kernels/amx_gemm.inc"
#include "expert_worker/kernels/delegate.inc"
// clang-format on

// Whether a scale covers at least two whole tiles of int8.
bool HasLongGroups(const PackedMatrix& w) {
  if (w.k_chunk < 128) return false;
  return w.group_columns == 0 || w.group_columns == 128 || w.group_columns >= kBlockInputs;
}

template <FormatTraits T>
void Gemm(const PackedMatrix& w, const GemmCall& call) {
  const GemmFunction few_rows = GemmOf<kAvx512VbmiTable, T>;
  if (call.rows < kTileRows) {
    few_rows(w, call);
  } else if constexpr (T.dot_group == 0) {
    GemmByTiles<T, FloatTiles<T>>(w, call, few_rows);
  } else if (T.dot_group == kStepAlign && HasLongGroups(w)) {
    GemmByTiles<T, Int8Tiles<T>>(w, call, few_rows);
  } else {
    GemmByTiles<T, FoldedTiles<T>>(w, call, few_rows);
  }
}

template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  if constexpr (T.dot_group != 0) {
    return EntryOver<kAvx512VbmiTable, T>(ActivationForm::kInt8, Gemm<T>);
  } else if constexpr (T.codes == CodeStorage::kE4m3 || T.codes == CodeStorage::kBf16) {
    return EntryOver<kAvx512VbmiTable, T>(ActivationForm::kBf16, Gemm<T>);
  } else {
    return EntryOver<kAvx512VbmiTable, T>(ActivationForm::kF32);
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return TableOver<kAvx512VbmiTable>(Isa::kAmx, "amx", KernelsOf<kFormats[kIndex]>()...);
}

}  // namespace

constinit const KernelTable kAmxTable = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
