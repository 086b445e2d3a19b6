// AMX (Sapphire Rapids and later): the kernels of avx512_vnni.cc, and tiles where a call has 16
// rows or more. Rows beyond a multiple of 16 go to the vector kernels.
//
// Arithmetic of the tiles, by format; activations come in the forms of avx512_vnni.cc:
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
// clang-format on

template <FormatTraits T>
void GemmOfVectors(const PackedMatrix& w, const GemmCall& call) {
  kAvx512VnniTable.format(T.format).gemm(w, call);
}

template <FormatTraits T>
void GemmExactOfVectors(const PackedMatrix& w, const GemmCall& call) {
  kAvx512VnniTable.format(T.format).gemm_exact(w, call);
}

// Whether a scale covers at least two whole tiles of int8.
bool HasLongGroups(const PackedMatrix& w) {
  if (w.k_chunk < 128) return false;
  return w.group_columns == 0 || w.group_columns == 128 || w.group_columns >= kBlockInputs;
}

template <FormatTraits T>
void Gemm(const PackedMatrix& w, const GemmCall& call) {
  const GemmFunction few_rows = GemmOfVectors<T>;
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
    return {T.format, ActivationForm::kInt8, T.dot_group, GemmExactOfVectors<T>, Gemm<T>};
  } else if constexpr (T.codes == CodeStorage::kE4m3 || T.codes == CodeStorage::kBf16) {
    return {T.format, ActivationForm::kBf16, 0, GemmExactOfVectors<T>, Gemm<T>};
  } else {
    return {T.format, ActivationForm::kF32, 0, GemmExactOfVectors<T>, GemmOfVectors<T>};
  }
}

// The function of avx512_vnni.cc's table.
template <auto kMember, typename... Arguments>
void OfVectors(Arguments... arguments) {
  (kAvx512VnniTable.*kMember)(arguments...);
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return {Isa::kAmx,
          "amx",
          {KernelsOf<kFormats[kIndex]>()...},
          OfVectors<&KernelTable::silu_mul>,
          OfVectors<&KernelTable::exp>,
          OfVectors<&KernelTable::add_scaled>,
          OfVectors<&KernelTable::widen_bf16>,
          OfVectors<&KernelTable::narrow_bf16>,
          OfVectors<&KernelTable::quantize>,
          OfVectors<&KernelTable::clamped_swiglu>};
}

}  // namespace

constinit const KernelTable kAmxTable = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
