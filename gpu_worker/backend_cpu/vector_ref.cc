// The scalar specification of VectorTable.

#include <bit>
#include <cmath>

#include "gpu_worker/backend_cpu/vector_kernels.h"

namespace tandem::gpu {
namespace {

struct RefLanes {
  struct V {
    float lane[kLanes];
  };
  struct D {
    double lane[kLanes];
  };
  static constexpr int kDotQueries = 1;
  static constexpr int kMixQueries = 1;
  static constexpr int kMixVectors = 1;

  static float ToFloat(float x) { return x; }
  static float ToFloat(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

  static V Zero() { return Broadcast(0.0f); }
  static V Broadcast(float x) {
    V v;
    for (float& lane : v.lane) lane = x;
    return v;
  }
  template <class T>
  static V Load(const T* p) {
    return LoadPart(p, kLanes);
  }
  template <class T>
  static V LoadPart(const T* p, int n) {
    V v = Zero();
    for (int i = 0; i < n; ++i) v.lane[i] = ToFloat(p[i]);
    return v;
  }
  static void Store(float* p, const V& v) { StorePart(p, kLanes, v); }
  static void StorePart(float* p, int n, const V& v) {
    for (int i = 0; i < n; ++i) p[i] = v.lane[i];
  }
  static V Fma(const V& a, const V& b, const V& c) {
    V v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return v;
  }
  static V Mul(const V& a, const V& b) {
    V v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = a.lane[i] * b.lane[i];
    return v;
  }
  static V Sub(const V& a, const V& b) {
    V v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = a.lane[i] - b.lane[i];
    return v;
  }
  static V Max(const V& a, const V& b) {
    V v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return v;
  }
  template <class T>
  static T Tree(const T* lane) {
    T half[8];
    for (int i = 0; i < 8; ++i) half[i] = lane[i] + lane[i + 8];
    T four[4];
    for (int i = 0; i < 4; ++i) four[i] = half[i] + half[i + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
  }
  template <int Q>
  static void SumKeys(const V v[Q][4], float sums[Q][4]) {
    for (int q = 0; q < Q; ++q) {
      for (int k = 0; k < 4; ++k) sums[q][k] = Tree(v[q][k].lane);
    }
  }
  static float LargestLane(const V& v) {
    float largest = v.lane[0];
    for (float x : v.lane) largest = largest > x ? largest : x;
    return largest;
  }
  static D ZeroD() { return D{}; }
  static D Widen(const V& v) {
    D d;
    for (int i = 0; i < kLanes; ++i) d.lane[i] = v.lane[i];
    return d;
  }
  static D AddD(const D& a, const D& b) {
    D d;
    for (int i = 0; i < kLanes; ++i) d.lane[i] = a.lane[i] + b.lane[i];
    return d;
  }
  static D FmaD(const D& a, const D& b, const D& c) {
    D d;
    for (int i = 0; i < kLanes; ++i) d.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return d;
  }
  static double SumD(const D& d) { return Tree(d.lane); }
};

}  // namespace

constinit const VectorTable kVectorRef = VectorKernels<RefLanes>::Table();

}  // namespace tandem::gpu
