#pragma once

// The kernels of one instruction set as a table of function pointers, one entry a weight format.
// Everything that multiplies weights on the CPU goes through a table: the routed experts of
// expert_worker and the linears of gpu_worker's CPU backend.
//
// Packed layout: formats.h; the same for every table. A weight matrix W of [n, k] (n outputs, k
// inputs, as checkpoints store linears) is cut into panels of kPanelWidth outputs. The input
// dimension may be stored in chunks that lie apart (`k_chunk`, `chunk_stride_bytes`), each a panel
// set of its own with its own copies of the scales: the down projection of an expert is spread over
// its segments and is still one matrix to a kernel.
//
// Two kernels a format:
//   gemm_exact  y[r][o] is one chain acc = fma(x[r][j], w[o][j], acc), j = 0 .. k-1, in F32, from
//   +0
//               (or from y[r][o] when accumulating), w the exact F32 value of weight_format.h. A
//               result depends on nothing but its own row and weights: not on rows, panel ranges,
//               threads or instruction set; every table gives the same bits (the payload of a NaN
//               aside). Elementwise functions promise the same.
//   gemm        The fast one, on activations in the form the format wants: F32, BF16 pairs, or int8
//               in groups of `dot_group` inputs with an F32 scale each, the same one for all
//               groups of ActivationGroup (formats.h) inputs of a block. Within the rounding of
//               that form (and of F32 sums) of the exact product of the given weights; sums of a
//               row do not depend on the values of the other rows of a call. (Tiles round once
//               more, and serve a call's first rows in multiples of 16: amx.cc.)
//
// Plain data; all functions are pure, thread-safe, never allocate, never fail. Shapes are elements.
// Callers check shapes; kernels do not.

#include <cstddef>
#include <cstdint>

#include "common/hw/isa.h"
#include "common/tensor/weight_format.h"
#include "expert_worker/kernels/formats.h"

namespace tandem::kernels {

using tandem::WeightFormat;

// A row-major matrix [n, k] (or a part of one: point at its first element).
struct PackSource {
  // Plain formats: elements of type `format` (kF32, kBf16 or kF16), converted when packed as
  // another plain format.
  const void* data;
  size_t row_stride;  // elements between two outputs
  WeightFormat format;
  // Quantized formats: codes and parameters, of the format that is packed.
  QuantizedView quantized;
};

struct PackedMatrix {
  const void* data;  // aligned to kPackAlignment
  uint32_t n;
  uint32_t k;
  uint32_t k_chunk;           // inputs of one panel that lie together; k when not cut
  uint32_t group_columns;     // inputs that share a scale; 0: all of a chunk. A chunk lies within a
                              // group (and super-block) or is a whole number of them.
  size_t panel_stride_bytes;  // from a panel to the next, within a chunk
  size_t chunk_stride_bytes;  // from a chunk to the next
};

// What a format's fast kernel multiplies. Chunk c of the inputs begins at element
// c * RoundUpTo(k_chunk, kStepAlign) of a row in the forms other than F32, and what pads a chunk is
// zero; F32 rows have no gaps.
enum class ActivationForm : uint8_t { kF32, kBf16, kInt8 };

// Rows of int8 activations: x ~ q * scale by group of dot_group inputs; groups of ActivationGroup
// inputs of a block have the same scale.
struct Int8Rows {
  const int8_t* q;  // [rows, stride]
  // [rows, group_stride] each:
  const float* scale;
  const float* scaled_sum;  // scale * sum of q
  const int32_t* sum;       // sum of q
  size_t stride;
  size_t group_stride;
};

struct GemmCall {
  const float* x;        // [rows, k]: gemm_exact, and gemm of form kF32
  size_t x_stride;       // floats
  const uint16_t* bf16;  // form kBf16
  size_t bf16_stride;    // elements
  Int8Rows int8;         // form kInt8
  // Row r of the call is row x_rows[r] of x; null means row r. (Grouping rows needs no copy.)
  const uint32_t* x_rows;
  float* y;  // [rows, n]; y[0][0] belongs to the first output of `panel_begin`
  size_t y_stride;
  // Row r of the call goes to row y_rows[r] of y; null means row r.
  const uint32_t* y_rows;
  uint32_t rows;
  uint32_t panel_begin;
  uint32_t panel_end;
  bool accumulate;
  // What the caller multiplies next, or null: a kernel may fetch it while it computes.
  const void* next;
};

using GemmFunction = void (*)(const PackedMatrix& w, const GemmCall& call);

// Kernels of one weight format.
struct FormatKernels {
  WeightFormat format;
  // What `gemm` multiplies, and inputs of an int8 group.
  ActivationForm form;
  uint32_t dot_group;
  GemmFunction gemm_exact;
  GemmFunction gemm;
};

// The numbers of an activation. limit 0: plain SwiGLU, silu_mul. Else, of gpt-oss (7, 1.702, 1) and
// of the DeepSeek-V4 form (10, 1, 0), with g' = min(g, limit) and u' = u held to [-limit, limit]:
//   y = g' / (1 + exp(-(alpha * g'))) * (u' + up_offset)
struct SwigluClamp {
  float limit = 0;
  float alpha = 1;
  float up_offset = 0;
  bool operator==(const SwigluClamp&) const = default;
};

struct KernelTable {
  Isa isa;
  const char* name;
  FormatKernels formats[kFormatCount];
  // y[i] = g[i] / (1 + exp(-g[i])) * u[i]; within 3 ulp of the exact value. y may be g.
  void (*silu_mul)(const float* g, const float* u, float* y, size_t n);
  // y[i] = exp(x[i]), within 1.05 ulp; 0 and infinity beyond F32's range.
  void (*exp)(const float* x, float* y, size_t n);
  // y[i] = fma(a, x[i], y[i])
  void (*add_scaled)(float a, const float* x, float* y, size_t n);
  // y[i] = the F32 value of x[i], a BF16 bit pattern.
  void (*widen_bf16)(const uint16_t* x, float* y, size_t n);
  // y[i] = x[i] rounded to BF16, ties to even; NaN stays NaN.
  void (*narrow_bf16)(const float* x, uint16_t* y, size_t n);
  // n inputs from the beginning of a block on, a multiple of the format's dot_group:
  // scale = max |x| / 127 of ActivationGroup inputs, q = round(x / scale). Where one of them is NaN
  // or infinite the scale is NaN, so that the row's results are NaN.
  void (*quantize)(const float* x, size_t n, WeightFormat format, int8_t* q, float* scale,
                   float* scaled_sum, int32_t* sum);
  // y may be g. REQUIRES: clamp.limit > 0.
  void (*clamped_swiglu)(const SwigluClamp& clamp, const float* g, const float* u, float* y,
                         size_t n);

  const FormatKernels& format(WeightFormat f) const { return formats[static_cast<size_t>(f)]; }
};

}  // namespace tandem::kernels
