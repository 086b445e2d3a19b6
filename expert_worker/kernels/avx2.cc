// AVX2 and FMA: a panel of 32 outputs is four vectors, taken as two halves where registers are
// short.

#include <immintrin.h>

#include <bit>
#include <utility>

#include "expert_worker/kernels/exact_values.h"
#include "expert_worker/kernels/exp_constants.h"
#include "expert_worker/kernels/kernel_table.h"
#include "expert_worker/kernels/quantize.h"
#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

template <int...>
struct Sequence {};

struct V {
  using F = __m256;
  using U = __m256i;
  static constexpr uint32_t kLanes = 8;
  // 6 rows x half a panel (2 vectors) are 12 of 16 registers; 2 hold weights, 1 a broadcast.
  static constexpr uint32_t kMaxRows = 6;
  using Rows = Sequence<0, 1, 2, 3, 4, 5>;
  static constexpr bool kBroadcastOperands = false;
  static constexpr uint32_t kFp8Rows = 6;
  // One row: 2 panels x 4 vectors are 8 chains, which hide 4 cycles of latency at 2 a cycle.
  static constexpr uint32_t MaxPanels(uint32_t rows) { return rows == 1 ? 2 : 1; }
  static constexpr int VectorsAtOnce(int rows) { return rows <= 3 ? 4 : 2; }

  static inline F Zero() { return _mm256_setzero_ps(); }
  static inline F Set(float v) { return _mm256_set1_ps(v); }
  static inline F Broadcast(const float& v) { return _mm256_broadcast_ss(&v); }
  static inline F Load(const float* p) { return _mm256_loadu_ps(p); }
  static inline U LoadWords(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static inline F LoadHalves(const char* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The mask stays in memory: a register less for sums, and a sum that has no register takes thrice
  // as long as the others.
  template <uint32_t kMask>
  static inline F And(U words) {
    alignas(32) static constexpr uint32_t kMasks[8] = {kMask, kMask, kMask, kMask,
                                                       kMask, kMask, kMask, kMask};
    F kept;
    __asm__("vpand %1, %2, %0"
            : "=x"(kept)
            : "m"(*reinterpret_cast<const __m256i*>(kMasks)), "x"(words));
    return kept;
  }
  static inline F LowHalfToFloat(U pair) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
  }
  static inline F HighHalfToFloat(U pair) { return And<0xFFFF0000>(pair); }
  static inline void Store(float* p, F v) { _mm256_storeu_ps(p, v); }
  // 2^(b - 127) of 8 bytes, but 0 of 0.
  static inline F PowersOfTwo(const char* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
  }
  static inline void Prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }

  // Of 32 E4M3 codes, as floats 2^-120 as large: half 0 is bytes 0 and 2 of every four (outputs
  // 4 * lane and 4 * lane + 2), half 1 bytes 1 and 3. Nine operations on 32 codes; widening bytes
  // to words and these, as halves, to floats takes twenty.
  template <uint32_t kHalf>
  static inline void E4m3(const char* codes, F (&out)[2]) {
    __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    if constexpr (kHalf == 0) words = _mm256_slli_epi16(words, 8);
    words = _mm256_srai_epi16(words, 4);
    // Sign, four bits of exponent and three of mantissa.
    out[0] = And<0x87F00000>(_mm256_slli_epi32(words, 16));
    out[1] = And<0x87F00000>(words);
  }
  // Of each half of the vectors, rows become columns.
  static inline void Transpose(F& a, F& b, F& c, F& d) {
    const __m256d ab0 = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
    const __m256d ab2 = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
    const __m256d cd0 = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
    const __m256d cd2 = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    a = _mm256_castpd_ps(_mm256_unpacklo_pd(ab0, cd0));
    b = _mm256_castpd_ps(_mm256_unpackhi_pd(ab0, cd0));
    c = _mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2));
    d = _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2));
  }
  // From outputs in order (vector v is 8v .. 8v + 7) to the order of E4m3's two halves.
  static inline void ToE4m3Order(F (&v)[4]) {
    F a = _mm256_permute2f128_ps(v[0], v[2], 0x20), b = _mm256_permute2f128_ps(v[0], v[2], 0x31);
    F c = _mm256_permute2f128_ps(v[1], v[3], 0x20), d = _mm256_permute2f128_ps(v[1], v[3], 0x31);
    Transpose(a, b, c, d);
    v[0] = a;
    v[1] = c;
    v[2] = b;
    v[3] = d;
  }
  static inline void FromE4m3Order(F (&v)[4]) {
    F a = v[0], b = v[2], c = v[1], d = v[3];
    Transpose(a, b, c, d);
    v[0] = _mm256_permute2f128_ps(a, b, 0x20);
    v[1] = _mm256_permute2f128_ps(c, d, 0x20);
    v[2] = _mm256_permute2f128_ps(a, b, 0x31);
    v[3] = _mm256_permute2f128_ps(c, d, 0x31);
  }

  static inline F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // sum += a * b, in the sum's register: left to itself g++ changes places, and runs out of them.
  static inline void Accumulate(F& sum, F a, F b) {
    sum = _mm256_fmadd_ps(a, b, sum);
    __asm__("" : "+x"(sum));
  }
  static inline F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static inline F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static inline F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static inline F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static inline F Negate(F a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static inline U Bits(F a) { return _mm256_castps_si256(a); }
  static inline U SetWords(int v) { return _mm256_set1_epi32(v); }
  static inline U AddWords(U a, U b) { return _mm256_add_epi32(a, b); }
  static inline U SubWords(U a, U b) { return _mm256_sub_epi32(a, b); }
  static inline U AndWords(U a, U b) { return _mm256_and_si256(a, b); }
  static inline U OrWords(U a, U b) { return _mm256_or_si256(a, b); }
  static inline U ShiftRight16(U a) { return _mm256_srli_epi32(a, 16); }
  static inline U ShiftRightArithmetic1(U a) { return _mm256_srai_epi32(a, 1); }
  static inline F PowerOfTwo(U n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static inline U SelectNan(F value, U if_nan, U otherwise) {
    const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(otherwise, if_nan, _mm256_castps_si256(nan));
  }

  // All ones in the lanes of [offset, offset + 8) that lie below `width`.
  static inline __m256i Mask(uint32_t offset, uint32_t width) {
    const int left = static_cast<int>(width) - static_cast<int>(offset);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static inline F LoadPart(const float* p, uint32_t offset, uint32_t width) {
    if (offset + kLanes <= width) return _mm256_loadu_ps(p + offset);
    return _mm256_maskload_ps(p + offset, Mask(offset, width));
  }
  static inline void StorePart(float* p, uint32_t offset, uint32_t width, F v) {
    if (offset + kLanes <= width) {
      _mm256_storeu_ps(p + offset, v);
    } else {
      _mm256_maskstore_ps(p + offset, Mask(offset, width), v);
    }
  }
  // There are no masked 16-bit accesses: the last few elements go through a buffer.
  static inline F WidenPart(const uint16_t* p, uint32_t width) {
    alignas(16) uint16_t part[kLanes] = {};
    if (width < kLanes) {
      for (uint32_t i = 0; i < width; ++i) part[i] = p[i];
      p = part;
    }
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return LowHalfToFloat(_mm256_cvtepu16_epi32(half));
  }
  static inline void StoreLowHalves(uint16_t* p, uint32_t width, U v) {
    const __m128i half =
        _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    if (width >= kLanes) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
      return;
    }
    alignas(16) uint16_t part[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(part), half);
    for (uint32_t i = 0; i < width; ++i) p[i] = part[i];
  }
};

// In this order: what is written over the policy, then the fast kernels.
// clang-format off
#include "expert_worker/kernels/elementwise.inc"
#include "expert_worker/kernels/exact.inc"
#include "expert_worker/kernels/avx2_codes.inc"
#include "expert_worker/kernels/avx2_rows.inc"
#include "expert_worker/kernels/avx2_int8.inc"
#include "expert_worker/kernels/fp8_fma.inc"
// clang-format on

// Plain elements are multiplied as they are: their exact kernel is the fastest there is.
template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  if constexpr (T.dot_group != 0) {
    return {T.format, ActivationForm::kInt8, T.dot_group, GemmExact<T>, GemmInt8<T>};
  } else if constexpr (T.codes == CodeStorage::kE4m3) {
    return {T.format, ActivationForm::kF32, 0, GemmExact<T>, GemmFp8<T>};
  } else {
    return {T.format, ActivationForm::kF32, 0, GemmExact<T>, GemmExact<T>};
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return {Isa::kAvx2,     "avx2",          {KernelsOf<kFormats[kIndex]>()...},
          SiluMul,        ExpArray,        AddScaled,
          WidenBf16Array, NarrowBf16Array, Quantize,
          ClampedSwiglu};
}

}  // namespace

constinit const KernelTable kAvx2Table = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
