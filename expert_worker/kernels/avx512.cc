// AVX-512 (F, BW, VL, DQ): a panel of 32 outputs is two vectors.

#include <immintrin.h>

#include "expert_worker/kernels/exp_constants.h"
#include "expert_worker/kernels/kernel_table.h"
#include "expert_worker/kernels/layout_plain.h"
#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

template <int...>
struct Sequence {};

struct V {
  using F = __m512;
  using U = __m512i;
  static constexpr uint32_t kLanes = 16;
  // 12 rows x 2 vectors are 24 of 32 registers; 2 hold weights, broadcasts come from memory.
  static constexpr uint32_t kMaxRows = 12;
  using Rows = Sequence<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11>;
  // At least 8 chains hide the latency of 4 cycles at 2 multiply-adds a cycle.
  static constexpr uint32_t MaxPanels(uint32_t rows) { return rows <= 3 ? 4 : rows <= 6 ? 2 : 1; }
  static constexpr uint32_t HalvesAtOnce(uint32_t) { return 1; }

  static inline F Zero() { return _mm512_setzero_ps(); }
  static inline F Set(float v) { return _mm512_set1_ps(v); }
  static inline F Broadcast(const float& v) { return _mm512_set1_ps(v); }
  static inline F Load(const float* p) { return _mm512_loadu_ps(p); }
  static inline U LoadWords(const char* p) { return _mm512_loadu_si512(p); }
  static inline F LowHalfToFloat(U pair) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
  }
  static inline F HighHalfToFloat(U pair) {
    return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(-65536)));
  }
  static inline void Prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }

  static inline F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static inline F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static inline F Negate(F a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static inline U Bits(F a) { return _mm512_castps_si512(a); }
  static inline U SetWords(int v) { return _mm512_set1_epi32(v); }
  static inline U AddWords(U a, U b) { return _mm512_add_epi32(a, b); }
  static inline U SubWords(U a, U b) { return _mm512_sub_epi32(a, b); }
  static inline U AndWords(U a, U b) { return _mm512_and_si512(a, b); }
  static inline U OrWords(U a, U b) { return _mm512_or_si512(a, b); }
  static inline U ShiftRight16(U a) { return _mm512_srli_epi32(a, 16); }
  static inline U ShiftRightArithmetic1(U a) { return _mm512_srai_epi32(a, 1); }
  static inline F PowerOfTwo(U n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
  }
  static inline U SelectNan(F value, U if_nan, U otherwise) {
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), otherwise,
                                   if_nan);
  }

  // The lanes of [offset, offset + 16) that lie below `width`.
  static inline __mmask16 Mask(uint32_t offset, uint32_t width) {
    if (offset >= width) return 0;
    const uint32_t left = width - offset;
    return left >= kLanes ? __mmask16{0xFFFF} : static_cast<__mmask16>((1u << left) - 1);
  }
  static inline F LoadPart(const float* p, uint32_t offset, uint32_t width) {
    if (offset + kLanes <= width) return _mm512_loadu_ps(p + offset);
    return _mm512_maskz_loadu_ps(Mask(offset, width), p + offset);
  }
  static inline void StorePart(float* p, uint32_t offset, uint32_t width, F v) {
    if (offset + kLanes <= width) {
      _mm512_storeu_ps(p + offset, v);  // a masked store costs a dozen cycles on Zen 4
    } else {
      _mm512_mask_storeu_ps(p + offset, Mask(offset, width), v);
    }
  }
  static inline F WidenPart(const uint16_t* p, uint32_t width) {
    const __m256i half = _mm256_maskz_loadu_epi16(Mask(0, width), p);
    return LowHalfToFloat(_mm512_cvtepu16_epi32(half));
  }
  static inline void StoreLowHalves(uint16_t* p, uint32_t width, U v) {
    _mm256_mask_storeu_epi16(p, Mask(0, width), _mm512_cvtepi32_epi16(v));
  }
};

#include "expert_worker/kernels/gemm_plain.inc"

}  // namespace

constinit const KernelTable kAvx512Table = TANDEM_VECTOR_TABLE(Isa::kAvx512, "avx512");

}  // namespace tandem::kernels
