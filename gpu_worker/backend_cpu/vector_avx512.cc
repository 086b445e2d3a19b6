// VectorTable with AVX-512 (F, BW, VL, DQ).

#include <immintrin.h>

#include "gpu_worker/backend_cpu/vector_kernels.h"

namespace tandem::gpu {
namespace {

struct Avx512Lanes {
  using V = __m512;
  struct D {
    __m512d low, high;
  };
  // 32 registers: 4 queries of 4 keys, or of 4 vectors, are 16 sums.
  static constexpr int kDotQueries = 4;
  static constexpr int kMixQueries = 4;
  static constexpr int kMixVectors = 4;

  static __mmask16 First(int n) { return static_cast<__mmask16>((1u << n) - 1); }
  static V FromBf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  static V Zero() { return _mm512_setzero_ps(); }
  static V Broadcast(float x) { return _mm512_set1_ps(x); }
  static V Load(const float* p) { return _mm512_loadu_ps(p); }
  static V Load(const uint16_t* p) {
    return FromBf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V LoadPart(const float* p, int n) { return _mm512_maskz_loadu_ps(First(n), p); }
  static V LoadPart(const uint16_t* p, int n) {
    return FromBf16(_mm256_maskz_loadu_epi16(First(n), p));
  }
  static void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static void StorePart(float* p, int n, V v) { _mm512_mask_storeu_ps(p, First(n), v); }
  static V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V Max(V a, V b) { return _mm512_max_ps(a, b); }
  // Quarter i of the result is the quarters of input i, added as 0 + 2, 1 + 3, then both.
  static V AddQuarters(V a, V b, V c, V d) {
    const V ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const V cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  }
  // Lane i of each quarter is the lanes of that quarter of input i, added as 0 + 2, 1 + 3, then
  // both.
  static V AddWithinQuarters(V a, V b, V c, V d) {
    const V ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const V cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  }
  template <int Q>
  static void SumKeys(const V v[Q][4], float sums[Q][4]) {
    if constexpr (Q == 4) {
      V keys[4];  // quarter q: query q
      for (int k = 0; k < 4; ++k) keys[k] = AddQuarters(v[0][k], v[1][k], v[2][k], v[3][k]);
      _mm512_storeu_ps(&sums[0][0], AddWithinQuarters(keys[0], keys[1], keys[2], keys[3]));
    } else {
      for (int q = 0; q < Q; ++q) {
        const V keys = AddQuarters(v[q][0], v[q][1], v[q][2], v[q][3]);  // quarter k: key k
        const V zero = Zero();
        alignas(64) float lanes[kLanes];
        _mm512_store_ps(lanes, AddWithinQuarters(keys, zero, zero, zero));
        for (int k = 0; k < 4; ++k) sums[q][k] = lanes[4 * k];
      }
    }
  }
  static float LargestLane(V v) {
    float lane[kLanes];
    Store(lane, v);
    float largest = lane[0];
    for (float x : lane) largest = largest > x ? largest : x;
    return largest;
  }
  static D ZeroD() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static D Widen(V v) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(v)),
            _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))};
  }
  static D AddD(const D& a, const D& b) {
    return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)};
  }
  static D FmaD(const D& a, const D& b, const D& c) {
    return {_mm512_fmadd_pd(a.low, b.low, c.low), _mm512_fmadd_pd(a.high, b.high, c.high)};
  }
  static double SumD(const D& d) {
    const __m512d eight = _mm512_add_pd(d.low, d.high);
    const __m256d four =
        _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    double lane[4];
    _mm256_storeu_pd(lane, four);
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
  }
};

}  // namespace

constinit const VectorTable kVectorAvx512 = VectorKernels<Avx512Lanes>::Table();

}  // namespace tandem::gpu
