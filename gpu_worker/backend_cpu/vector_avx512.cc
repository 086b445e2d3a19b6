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
  static V Max(V a, V b) { return _mm512_max_ps(a, b); }
  static __m128 ToFour(V v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  static void Sum4(const V v[4], float sums[4]) {
    const __m128 a = _mm_hadd_ps(ToFour(v[0]), ToFour(v[1]));
    const __m128 b = _mm_hadd_ps(ToFour(v[2]), ToFour(v[3]));
    _mm_storeu_ps(sums, _mm_hadd_ps(a, b));
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
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
  }
};

}  // namespace

constinit const VectorTable kVectorAvx512 = VectorKernels<Avx512Lanes>::Table();

}  // namespace tandem::gpu
