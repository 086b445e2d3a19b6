#pragma once

// The bodies behind VectorTable, written once over `L`, 16 float lanes of one instruction set. Each
// vector_<isa>.cc defines its L in an anonymous namespace, so that every instantiation is local to
// the object that was compiled for that instruction set.
//
// L has: V (16 floats), D (16 doubles), kDotQueries, kMixQueries, kMixVectors (register blocking),
// Zero, Load(T*), LoadPart(T*, n) (zeros beyond n), Store, StorePart, Broadcast, Fma, Mul, Sub,
// Max, LargestLane; SumKeys<Q>(V[Q][4], float[Q][4]), the sum of each V by the tree of
// vector_table.h; in F64 Widen, AddD, FmaD, ZeroD, SumD.

#include <cstddef>
#include <cstdint>
#include <limits>

#include "gpu_worker/backend_cpu/vector_table.h"

namespace tandem::gpu {

inline constexpr int kLanes = 16;

template <class L>
struct VectorKernels {
  using V = typename L::V;
  static constexpr int kKeys = 4;  // keys of one register block of Dot

  template <class T, int Q, int K>
  static void DotBlock(const DotCall& c, int query, int key) {
    const T* keys = static_cast<const T*>(c.keys) + static_cast<size_t>(key) * c.key_stride;
    V acc[Q][kKeys];
    for (int q = 0; q < Q; ++q) {
      for (int k = 0; k < kKeys; ++k) acc[q][k] = L::Zero();
    }
    int d = 0;
    for (; d + kLanes <= c.dim; d += kLanes) {
      V x[Q];
      for (int q = 0; q < Q; ++q) x[q] = L::Load(c.queries[query + q] + d);
      for (int k = 0; k < K; ++k) {
        const V y = L::Load(keys + k * c.key_stride + d);
        for (int q = 0; q < Q; ++q) acc[q][k] = L::Fma(x[q], y, acc[q][k]);
      }
    }
    if (d < c.dim) {
      V x[Q];
      for (int q = 0; q < Q; ++q) x[q] = L::LoadPart(c.queries[query + q] + d, c.dim - d);
      for (int k = 0; k < K; ++k) {
        const V y = L::LoadPart(keys + k * c.key_stride + d, c.dim - d);
        for (int q = 0; q < Q; ++q) acc[q][k] = L::Fma(x[q], y, acc[q][k]);
      }
    }
    float all_sums[Q][kKeys];
    L::template SumKeys<Q>(acc, all_sums);
    for (int q = 0; q < Q; ++q) {
      const float* sums = all_sums[q];
      float* scores = c.scores + static_cast<size_t>(query + q) * c.score_stride + key;
      for (int k = 0; k < K; ++k) scores[k] = c.accumulate ? scores[k] + sums[k] : sums[k];
    }
  }

  template <class T, int Q>
  static void DotQueries(const DotCall& c, int query) {
    int key = 0;
    for (; key + kKeys <= c.key_count; key += kKeys) DotBlock<T, Q, kKeys>(c, query, key);
    for (; key < c.key_count; ++key) DotBlock<T, Q, 1>(c, query, key);
  }

  template <class T>
  static void Dot(const DotCall& c) {
    int query = 0;
    for (; query + L::kDotQueries <= c.query_count; query += L::kDotQueries) {
      DotQueries<T, L::kDotQueries>(c, query);
    }
    for (; query < c.query_count; ++query) DotQueries<T, 1>(c, query);
  }

  template <class T, int Q, int N>
  static void MixBlock(const MixCall& c, int query, int d) {
    const T* values = static_cast<const T*>(c.values) + d;
    const float* weights = c.weights + static_cast<size_t>(query) * c.weight_stride;
    V acc[Q][N];
    for (int q = 0; q < Q; ++q) {
      for (int i = 0; i < N; ++i) acc[q][i] = L::Load(c.outputs[query + q] + d + i * kLanes);
    }
    for (int j = 0; j < c.key_count; ++j) {
      V x[N];
      for (int i = 0; i < N; ++i) x[i] = L::Load(values + j * c.value_stride + i * kLanes);
      for (int q = 0; q < Q; ++q) {
        const V w = L::Broadcast(weights[q * c.weight_stride + j]);
        for (int i = 0; i < N; ++i) acc[q][i] = L::Fma(w, x[i], acc[q][i]);
      }
    }
    for (int q = 0; q < Q; ++q) {
      for (int i = 0; i < N; ++i) L::Store(c.outputs[query + q] + d + i * kLanes, acc[q][i]);
    }
  }

  template <class T>
  static void MixTail(const MixCall& c, int query, int d) {
    const T* values = static_cast<const T*>(c.values) + d;
    const float* weights = c.weights + static_cast<size_t>(query) * c.weight_stride;
    float* out = c.outputs[query] + d;
    V acc = L::LoadPart(out, c.dim - d);
    for (int j = 0; j < c.key_count; ++j) {
      const V x = L::LoadPart(values + j * c.value_stride, c.dim - d);
      acc = L::Fma(L::Broadcast(weights[j]), x, acc);
    }
    L::StorePart(out, c.dim - d, acc);
  }

  template <class T, int Q>
  static void MixQueries(const MixCall& c, int query) {
    constexpr int kWide = L::kMixVectors;
    int d = 0;
    for (; d + kWide * kLanes <= c.dim; d += kWide * kLanes) MixBlock<T, Q, kWide>(c, query, d);
    for (; d + kLanes <= c.dim; d += kLanes) MixBlock<T, Q, 1>(c, query, d);
    if (d == c.dim) return;
    for (int q = 0; q < Q; ++q) MixTail<T>(c, query + q, d);
  }

  template <class T>
  static void Mix(const MixCall& c) {
    int query = 0;
    for (; query + L::kMixQueries <= c.query_count; query += L::kMixQueries) {
      MixQueries<T, L::kMixQueries>(c, query);
    }
    for (; query < c.query_count; ++query) MixQueries<T, 1>(c, query);
  }

  static double Sum(const float* x, size_t n) {
    typename L::D acc = L::ZeroD();
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) acc = L::AddD(acc, L::Widen(L::Load(x + i)));
    if (i < n) acc = L::AddD(acc, L::Widen(L::LoadPart(x + i, static_cast<int>(n - i))));
    return L::SumD(acc);
  }

  static double SumSquares(const float* x, size_t n) {
    typename L::D acc = L::ZeroD();
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const typename L::D v = L::Widen(L::Load(x + i));
      acc = L::FmaD(v, v, acc);
    }
    if (i < n) {
      const typename L::D v = L::Widen(L::LoadPart(x + i, static_cast<int>(n - i)));
      acc = L::FmaD(v, v, acc);
    }
    return L::SumD(acc);
  }

  static float Max(const float* x, size_t n) {
    float largest = -std::numeric_limits<float>::infinity();
    size_t i = 0;
    if (n >= kLanes) {
      V acc = L::Load(x);
      for (i = kLanes; i + kLanes <= n; i += kLanes) acc = L::Max(acc, L::Load(x + i));
      largest = L::LargestLane(acc);
    }
    for (; i < n; ++i) largest = largest > x[i] ? largest : x[i];
    return largest;
  }

  static float ScaleMax(float* x, size_t n, float factor) {
    const V f = L::Broadcast(factor);
    size_t i = 0;
    float largest = -std::numeric_limits<float>::infinity();
    if (n >= kLanes) {
      V acc = L::Broadcast(largest);
      for (; i + kLanes <= n; i += kLanes) {
        const V v = L::Mul(L::Load(x + i), f);
        L::Store(x + i, v);
        acc = L::Max(acc, v);
      }
      largest = L::LargestLane(acc);
    }
    for (; i < n; ++i) {
      x[i] *= factor;
      largest = largest > x[i] ? largest : x[i];
    }
    return largest;
  }

  static void Subtract(float* x, size_t n, float amount) {
    const V a = L::Broadcast(amount);
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) L::Store(x + i, L::Sub(L::Load(x + i), a));
    for (; i < n; ++i) x[i] -= amount;
  }

  static constexpr VectorTable Table() {
    return {Dot<float>, Dot<uint16_t>, Mix<float>, Mix<uint16_t>, Sum,
            SumSquares, Max,           ScaleMax,   Subtract};
  }
};

}  // namespace tandem::gpu
