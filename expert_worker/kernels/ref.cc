// The reference table: scalar, obvious, never tuned. It is the specification that every other table
// must equal bit for bit.

#include <bit>
#include <cmath>

#include "expert_worker/kernels/exp_constants.h"
#include "expert_worker/kernels/kernel_table.h"
#include "expert_worker/kernels/layout_plain.h"
#include "expert_worker/kernels/tables.h"

namespace tandem::kernels {
namespace {

float WidenBf16(uint16_t v) { return std::bit_cast<float>(static_cast<uint32_t>(v) << 16); }

float WeightF32(const char* step, uint32_t lane) {
  return reinterpret_cast<const float*>(step)[lane];
}

float WeightBf16(const char* step, uint32_t lane) {
  const uint32_t half = kPanelWidth / 2;
  return WidenBf16(reinterpret_cast<const uint16_t*>(step)[2 * (lane % half) + lane / half]);
}

template <float (*kWeight)(const char* step, uint32_t lane), size_t kElementBytes>
void Gemm(const PackedMatrix& w, const GemmCall& call) {
  for (uint32_t r = 0; r < call.rows; ++r) {
    const float* x = call.x + (call.x_rows != nullptr ? call.x_rows[r] : r) * call.x_stride;
    float* y = call.y + r * call.y_stride;
    for (uint32_t o = call.panel_begin * kPanelWidth; o < w.n && o < call.panel_end * kPanelWidth;
         ++o) {
      float* out = y + (o - call.panel_begin * kPanelWidth);
      float sum = call.accumulate ? *out : 0.0f;
      for (uint32_t j = 0; j < w.k; ++j) {
        const char* step = static_cast<const char*>(w.data) +
                           (j / w.k_chunk) * w.chunk_stride_bytes +
                           (o / kPanelWidth) * w.panel_stride_bytes +
                           (j % w.k_chunk) * (kPanelWidth * kElementBytes);
        sum = std::fma(x[j], kWeight(step, o % kPanelWidth), sum);
      }
      *out = sum;
    }
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

void AddScaled(float a, const float* x, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] = std::fma(a, x[i], y[i]);
}

void WidenBf16Array(const uint16_t* x, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] = WidenBf16(x[i]);
}

void NarrowBf16Array(const float* x, uint16_t* y, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    y[i] = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
  }
}

}  // namespace

constinit const KernelTable kRefTable = {
    Isa::kRef,
    "ref",
    {{kLayoutF32Panel32, PanelBytesF32, PackF32, UnpackF32, Gemm<WeightF32, 4>},
     {kLayoutBf16Panel32, PanelBytesBf16, PackBf16, UnpackBf16, Gemm<WeightBf16, 2>}},
    SiluMul,
    ExpArray,
    AddScaled,
    WidenBf16Array,
    NarrowBf16Array,
};

}  // namespace tandem::kernels
