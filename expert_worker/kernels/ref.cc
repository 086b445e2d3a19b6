// The reference table: scalar, obvious, never tuned. Its exact kernels are the specification that
// every other table must equal bit for bit; its fast kernels are the arithmetic that the others
// must come close to (their F32 sums run in another order).

#include <bit>
#include <cmath>
#include <utility>

#include "expert_worker/kernels/exact_values.h"
#include "expert_worker/kernels/exp_constants.h"
#include "expert_worker/kernels/kernel_table.h"
#include "expert_worker/kernels/quantize.h"
#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

PanelView PanelOf(const PackedMatrix& w, const PanelGeometry& geometry, uint32_t j, uint32_t o) {
  return {static_cast<const char*>(w.data) + size_t{j / w.k_chunk} * w.chunk_stride_bytes +
              size_t{o / kPanelWidth} * w.panel_stride_bytes,
          geometry, w.group_columns};
}

// Calls dot(row of x, output, &y) for every element of the result.
template <typename Dot>
void ForEachOutput(const PackedMatrix& w, const GemmCall& call, Dot dot) {
  const uint32_t first = call.panel_begin * kPanelWidth;
  for (uint32_t r = 0; r < call.rows; ++r) {
    const size_t source = call.x_rows != nullptr ? call.x_rows[r] : r;
    const size_t target = call.y_rows != nullptr ? call.y_rows[r] : r;
    float* y = call.y + target * call.y_stride;
    for (uint32_t o = first; o < w.n && o < call.panel_end * kPanelWidth; ++o) {
      dot(source, o, y + (o - first));
    }
  }
}

template <FormatTraits T>
void GemmExact(const PackedMatrix& w, const GemmCall& call) {
  const PanelGeometry geometry = GeometryOf(T.format, w.k_chunk, w.group_columns);
  ForEachOutput(w, call, [&](size_t row, uint32_t o, float* y) {
    const float* x = call.x + row * call.x_stride;
    float sum = call.accumulate ? *y : 0.0f;
    for (uint32_t j = 0; j < w.k; ++j) {
      const PanelView panel = PanelOf(w, geometry, j, o);
      sum = std::fma(x[j], ExactValue<T>(panel, j % w.k_chunk, o % kPanelWidth), sum);
    }
    *y = sum;
  });
}

// Quantized activations against the exact weights.
template <FormatTraits T>
void GemmInt8(const PackedMatrix& w, const GemmCall& call) {
  const PanelGeometry geometry = GeometryOf(T.format, w.k_chunk, w.group_columns);
  const size_t padded = RoundUpTo(w.k_chunk, kStepAlign);
  ForEachOutput(w, call, [&](size_t row, uint32_t o, float* y) {
    double sum = call.accumulate ? *y : 0.0;
    for (uint32_t j = 0; j < w.k; ++j) {
      const PanelView panel = PanelOf(w, geometry, j, o);
      const size_t at = j / w.k_chunk * padded + j % w.k_chunk;
      const float scale = call.int8.scale[row * call.int8.group_stride + at / T.dot_group];
      const float x = scale * static_cast<float>(call.int8.q[row * call.int8.stride + at]);
      sum += static_cast<double>(x) * ExactValue<T>(panel, j % w.k_chunk, o % kPanelWidth);
    }
    *y = static_cast<float>(sum);
  });
}

template <FormatTraits T>
constexpr FormatKernels KernelsOf() {
  if constexpr (T.dot_group == 0) {
    return {T.format, ActivationForm::kF32, 0, GemmExact<T>, GemmExact<T>};
  } else {
    return {T.format, ActivationForm::kInt8, T.dot_group, GemmExact<T>, GemmInt8<T>};
  }
}

float PowerOfTwo(int32_t n) { return std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23); }

float Exp(float x) {
  x = kExpMax < x ? kExpMax : x;
  x = kExpMin > x ? kExpMin : x;
  const float t = std::fma(x, kLog2E, kRoundMagic);
  const auto n =
      static_cast<int32_t>(std::bit_cast<uint32_t>(t) - std::bit_cast<uint32_t>(kRoundMagic));
  const float f = t - kRoundMagic;
  float r = std::fma(f, -kLn2High, x);
  r = std::fma(f, -kLn2Low, r);
  float q = kExpQ[4];
  for (int i = 3; i >= 0; --i) q = std::fma(q, r, kExpQ[i]);
  const float e = std::fma(r * r, q, r) + 1.0f;
  const int32_t half = n >> 1;
  return e * PowerOfTwo(half) * PowerOfTwo(n - half);
}

void ExpArray(const float* x, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] = Exp(x[i]);
}

void SiluMul(const float* g, const float* u, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] = g[i] / (1.0f + Exp(-g[i])) * u[i];
}

void ClampedSwiglu(const SwigluClamp& clamp, const float* g, const float* u, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float gate = clamp.limit < g[i] ? clamp.limit : g[i];
    const float below = clamp.limit < u[i] ? clamp.limit : u[i];
    const float up = -clamp.limit > below ? -clamp.limit : below;
    y[i] = gate / (1.0f + Exp(-(clamp.alpha * gate))) * (up + clamp.up_offset);
  }
}

void AddScaled(float a, const float* x, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] = std::fma(a, x[i], y[i]);
}

void WidenBf16Array(const uint16_t* x, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] = Bf16Value(x[i]);
}

void NarrowBf16Array(const float* x, uint16_t* y, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    y[i] = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
  }
}

template <size_t... kIndex>
constexpr KernelTable MakeTable(std::index_sequence<kIndex...>) {
  return {Isa::kRef,      "ref",           {KernelsOf<kFormats[kIndex]>()...},
          SiluMul,        ExpArray,        AddScaled,
          WidenBf16Array, NarrowBf16Array, Quantize,
          ClampedSwiglu};
}

}  // namespace

constinit const KernelTable kRefTable = MakeTable(std::make_index_sequence<kFormatCount>{});

}  // namespace tandem::kernels
