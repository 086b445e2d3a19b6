// VectorTable with AVX2 and FMA. Compiled with -mavx2 -mfma.

#include <immintrin.h>

#include "gpu_worker/backend_cpu/vector_kernels.h"

namespace tandem::gpu {
namespace {

struct Avx2Lanes {
  struct V {
    __m256 low, high;
  };
  struct D {
    __m256d part[4];  // lanes 4i .. 4i + 3
  };
  // 16 registers: 4 keys of one query are 8 sums; 2 queries of 2 vectors are 8 sums.
  static constexpr int kDotQueries = 1;
  static constexpr int kMixQueries = 2;
  static constexpr int kMixVectors = 2;

  static V Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V Broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static __m256 Widen8(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static V Load(const uint16_t* p) { return {Widen8(p), Widen8(p + 8)}; }
  template <class T>
  static V LoadPart(const T* p, int n) {
    T copy[kLanes] = {};
    for (int i = 0; i < n; ++i) copy[i] = p[i];
    return Load(copy);
  }
  static void Store(float* p, const V& v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
  }
  static void StorePart(float* p, int n, const V& v) {
    float copy[kLanes];
    Store(copy, v);
    for (int i = 0; i < n; ++i) p[i] = copy[i];
  }
  static V Fma(const V& a, const V& b, const V& c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static V Mul(const V& a, const V& b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static V Sub(const V& a, const V& b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
  }
  static V Max(const V& a, const V& b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  static __m128 ToFour(const V& v) {
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  template <int Q>
  static void SumKeys(const V v[Q][4], float sums[Q][4]) {
    for (int q = 0; q < Q; ++q) {
      // [a0 b0 a1 b1] + [a2 b2 a3 b3], the same of c and d, then the pairs of all four.
      const __m128 a = ToFour(v[q][0]), b = ToFour(v[q][1]);
      const __m128 c = ToFour(v[q][2]), d = ToFour(v[q][3]);
      const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
      const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
      _mm_storeu_ps(sums[q], _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
    }
  }
  static float LargestLane(const V& v) {
    float lane[8];
    _mm256_storeu_ps(lane, _mm256_max_ps(v.low, v.high));
    float largest = lane[0];
    for (float x : lane) largest = largest > x ? largest : x;
    return largest;
  }
  static D ZeroD() { return {}; }
  static D Widen(const V& v) {
    return {{_mm256_cvtps_pd(_mm256_castps256_ps128(v.low)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(v.low, 1)),
             _mm256_cvtps_pd(_mm256_castps256_ps128(v.high)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(v.high, 1))}};
  }
  static D AddD(const D& a, const D& b) {
    D d;
    for (int i = 0; i < 4; ++i) d.part[i] = _mm256_add_pd(a.part[i], b.part[i]);
    return d;
  }
  static D FmaD(const D& a, const D& b, const D& c) {
    D d;
    for (int i = 0; i < 4; ++i) d.part[i] = _mm256_fmadd_pd(a.part[i], b.part[i], c.part[i]);
    return d;
  }
  static double SumD(const D& d) {
    const __m256d four =
        _mm256_add_pd(_mm256_add_pd(d.part[0], d.part[2]), _mm256_add_pd(d.part[1], d.part[3]));
    double lane[4];
    _mm256_storeu_pd(lane, four);
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
  }
};

}  // namespace

constinit const VectorTable kVectorAvx2 = VectorKernels<Avx2Lanes>::Table();

}  // namespace tandem::gpu
