#pragma once

// The kernels of one instruction set as a table of function pointers, one row of pointers a weight
// format. Everything that multiplies weights on the CPU goes through a table: the routed experts of
// expert_worker and the linears of gpu_worker's CPU backend.
//
// Packed layout (the same for every table; a format's `layout_tag` names it): a weight matrix W of
// [n, k] (n outputs, k inputs, as checkpoints store linears) is cut into panels of kPanelWidth
// outputs. A panel stores, for each input step, the weights of its outputs side by side, so that
// one step is one multiply-add of whole vectors. The last panel is padded with zeros. The input
// dimension may be stored in chunks that lie apart (`k_chunk`, `chunk_stride_bytes`): the down
// projection of an expert is spread over its segments and is still one matrix to a kernel.
//
// Numerics: y[r][o] is one chain acc = fma(x[r][j], w[o][j], acc) for j = 0 .. k-1 in F32, starting
// from +0 (or from y[r][o] when accumulating). So a result depends on nothing but its own row and
// weights: not on rows, panel ranges, threads or instruction set, and every table gives the same
// bits (the payload of a NaN aside). Elementwise functions promise the same.
//
// Plain data; all functions are pure, thread-safe, never allocate, never fail. Shapes are elements,
// strides of activations are in floats. Callers check shapes; kernels do not.

#include <cstddef>
#include <cstdint>

#include "common/hw/isa.h"

namespace tandem::kernels {

inline constexpr uint32_t kPanelWidth = 32;
// Alignment of packed data; a panel's step is a multiple of 64 bytes in the formats of today.
inline constexpr size_t kPackAlignment = 64;

// Stored in manifests: values never change.
enum class WeightFormat : uint8_t {
  kF32 = 0,
  kBf16 = 1,
  kF16 = 2,
  kFp8Block = 3,    // E4M3, a scale a 128x128 block
  kFp8Channel = 4,  // E4M3, a scale an output
  kMxfp8 = 5,
  kInt8Channel = 6,
  kInt8Group = 7,
  kInt4Group = 8,      // symmetric
  kInt4GroupZero = 9,  // with zero points
  kMxfp4 = 10,
  kNvfp4 = 11,
  kGguf = 12,  // first of a range of block types
  kCount = 32,
};

// Element types a matrix can be packed from.
enum class SourceType : uint8_t { kF32 = 0, kBf16 = 1 };

// A row-major matrix [n, k] (or a part of one: point `data` at its first element).
struct PackSource {
  const void* data;
  size_t row_stride;  // elements between two outputs
  SourceType type;
  // Scales and zero points of quantized formats, each with its own stride; null for plain formats.
  const void* scales;
  size_t scale_stride;
  const void* zeros;
  size_t zero_stride;
  // Place of data[0] in the whole matrix: scales are found by absolute coordinates.
  uint32_t row_begin;
  uint32_t column_begin;
};

struct PackedMatrix {
  const void* data;  // aligned to kPackAlignment
  uint32_t n;
  uint32_t k;
  uint32_t k_chunk;           // steps of one panel that lie together; k when not cut
  size_t panel_stride_bytes;  // from a panel to the next, within a chunk
  size_t chunk_stride_bytes;  // from a chunk to the next
};

struct GemmCall {
  const float* x;  // [rows, k]
  size_t x_stride;
  // Row r of the call is row x_rows[r] of x; null means row r. (Grouping rows needs no copy.)
  const uint32_t* x_rows;
  float* y;  // [rows, n]; y[0][0] belongs to the first output of `panel_begin`
  size_t y_stride;
  uint32_t rows;
  uint32_t panel_begin;
  uint32_t panel_end;
  bool accumulate;
};

// Kernels of one weight format. All null in a table that lacks the format.
struct FormatKernels {
  // Names the packed layout; stored in manifests and compared before packed bytes are used.
  uint32_t layout_tag;
  // Bytes of one panel of `k` steps; a multiple of kPackAlignment.
  size_t (*panel_bytes)(uint32_t k);
  // Packs [n, k] of `source` into `panels` = CeilDiv(n, kPanelWidth) panels of panel_bytes(k_chunk)
  // each, k <= k_chunk; what is not covered is zero.
  void (*pack)(const PackSource& source, uint32_t n, uint32_t k, uint32_t k_chunk, void* panels);
  // The inverse, exact up to the format's own decoding: out[n, k] F32, row-major, dense.
  void (*unpack)(const PackedMatrix& w, float* out);
  // y (+)= x W^T for the outputs of panels [panel_begin, panel_end).
  void (*gemm)(const PackedMatrix& w, const GemmCall& call);
};

struct KernelTable {
  Isa isa;
  const char* name;
  // Exact: F32 activations, the chain above. Serves every format in parity mode.
  FormatKernels formats[static_cast<size_t>(WeightFormat::kCount)];
  // y[i] = g[i] / (1 + exp(-g[i])) * u[i]; within 3 ulp of the exact value.
  void (*silu_mul)(const float* g, const float* u, float* y, size_t n);
  // y[i] = exp(x[i]), within 1.05 ulp; 0 and infinity beyond F32's range.
  void (*exp)(const float* x, float* y, size_t n);
  // y[i] = fma(a, x[i], y[i])
  void (*add_scaled)(float a, const float* x, float* y, size_t n);
  // y[i] = the F32 value of x[i], a BF16 bit pattern.
  void (*widen_bf16)(const uint16_t* x, float* y, size_t n);
  // y[i] = x[i] rounded to BF16, ties to even; NaN stays NaN.
  void (*narrow_bf16)(const float* x, uint16_t* y, size_t n);

  const FormatKernels& format(WeightFormat f) const { return formats[static_cast<size_t>(f)]; }
};

}  // namespace tandem::kernels
