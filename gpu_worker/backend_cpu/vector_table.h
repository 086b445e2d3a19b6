#pragma once

// The loops of the CPU backend that need wide registers and a fixed order of summation, as one
// table of function pointers an instruction set (the same idea as
// expert_worker/kernels/kernel_table.h, which has the matrix products and exp). Every table gives
// the same bits:
//   dot:  16 partial sums, lane i takes the elements i mod 16 by fma; then i + 8, i + 4, i + 2,
//         i + 1 are added to lane i.
//   mix:  one fma chain per output element, in key order.
//   sum, sum_squares: as dot, in F64 (a product of two F32 is exact there).
// So a result depends on its own operands only, not on how many queries or keys a call has.
//
// Plain data; functions are pure, thread-safe, never allocate. Strides are in elements.

#include <cstddef>

#include "expert_worker/kernels/kernel_table.h"

namespace tandem::gpu {

// scores[q * score_stride + j] (+)= queries[q] . keys[j]
struct DotCall {
  const float* const* queries;  // [query_count] of [dim]
  int query_count;
  const void* keys;  // [key_count, dim]
  size_t key_stride;
  int key_count;
  int dim;
  float* scores;
  size_t score_stride;
  bool accumulate;
};

// outputs[q][d] += sum over j of weights[q * weight_stride + j] * values[j][d]
struct MixCall {
  const float* weights;
  size_t weight_stride;
  int query_count;
  const void* values;  // [key_count, dim]
  size_t value_stride;
  int key_count;
  int dim;
  float* const* outputs;  // [query_count] of [dim]
};

struct VectorTable {
  void (*dot_f32)(const DotCall& call);
  void (*dot_bf16)(const DotCall& call);
  void (*mix_f32)(const MixCall& call);
  void (*mix_bf16)(const MixCall& call);
  double (*sum)(const float* x, size_t n);
  double (*sum_squares)(const float* x, size_t n);
  // The largest element; -infinity when n is 0. NaN may be passed over.
  float (*max)(const float* x, size_t n);
  // x *= factor; returns the largest result, as max.
  float (*scale_max)(float* x, size_t n, float factor);
  // x -= amount
  void (*subtract)(float* x, size_t n, float amount);
};

extern const VectorTable kVectorRef;
extern const VectorTable kVectorAvx2;
extern const VectorTable kVectorAvx512;

// The widest table that needs no more than `isa`.
const VectorTable& VectorTableFor(Isa isa);

}  // namespace tandem::gpu
