#pragma once

// The arithmetic of a weight matrix, whatever container it came from: one code a weight and, for
// quantized formats, parameters a group of consecutive inputs (columns) of one output (row). Every
// checkpoint scheme and GGUF block type is one of these; readers in common/checkpoint produce them,
// expert_worker/kernels packs and multiplies them. Plain data.
//
// The exact value of a weight, every operation one F32 operation rounded to nearest:
//
//   format         code          value                                  parameters
//   kF32/kBf16/kF16              the element itself
//   kFp8           E4M3          e4m3(c) * s                            scale F32 bits
//   kMxfp8         E4M3          e4m3(c) * 2^(s - 127)                  scale E8M0
//   kInt8{..}      two's compl.  int8(c) * s                            scale of the named type
//   kInt8Zero{..}  0..255        (c - z) * s                            and min: zero point 0..255
//   kInt4{..}      0..15         (c - 8) * s                            scale of the named type
//   kInt4Zero{..}  0..15         (c - z) * s                            and min: zero point 0..255
//   kMxfp4         0..15         e2m1(c) * 2^(s - 127)                  scale E8M0, groups of 32
//   kNvfp4         0..15         e2m1(c) * (e4m3(s) * g)                scale E4M3, groups of 16;
//                                                                       super F32 bits of g
//   kQ4_1/kQ5_1    0..15/0..31   d * c + m                              scale d, min m: F16
//   kQ5_0          0..31         (c - 16) * d                           scale d: F16
//   kQ2K           0..3          (d * s) * c - dmin * m                 scale, min 0..15, of 16
//   kQ3K           0..7          (d * s) * (c - 4)                      scale int8 (-32..31), of 16
//   kQ4K/kQ5K      0..15/0..31   (d * s) * c - dmin * m                 scale, min 0..63, of 32
//   kQ6K           0..63         (d * s) * (c - 32)                     scale int8, of 16
//   kIq4Nl         0..15         table(c) * d                           scale F16, groups of 32
//   kIq4Xs         0..15         (d * s) * table(c)                     scale int8 (-32..31), of 32
//
// K-quants and IQ4_XS keep d (and dmin) as F16 for 256 columns: super = d | dmin << 16. Q4_0 is
// kInt4F16 and Q8_0 kInt8F16 in groups of 32; a GGUF MXFP4 block is kMxfp4 (its E8M0 halves and its
// doubled table cancel). A group of `group_columns` = 0 is a whole row (per-channel scales).

#include <cstdint>

namespace tandem {

// Stored in manifests: values never change.
enum class WeightFormat : uint8_t {
  kF32 = 0,
  kBf16 = 1,
  kF16 = 2,
  kFp8 = 3,
  kMxfp8 = 4,
  kInt8F32 = 5,
  kInt8Bf16 = 6,
  kInt8F16 = 7,
  kInt4F32 = 8,
  kInt4Bf16 = 9,
  kInt4F16 = 10,
  kInt4ZeroF32 = 11,
  kInt4ZeroBf16 = 12,
  kInt4ZeroF16 = 13,
  kMxfp4 = 14,
  kNvfp4 = 15,
  kQ4_1 = 16,
  kQ5_0 = 17,
  kQ5_1 = 18,
  kQ2K = 19,
  kQ3K = 20,
  kQ4K = 21,
  kQ5K = 22,
  kQ6K = 23,
  kIq4Nl = 24,
  kIq4Xs = 25,
  kInt8ZeroF32 = 26,
  kInt8ZeroBf16 = 27,
  kInt8ZeroF16 = 28,
  kCount = 29,
};

constexpr bool IsPlain(WeightFormat format) { return format <= WeightFormat::kF16; }

// Parameters of one group, raw bits in the types of the table above, zero-extended (signed ones
// two's complement in their low byte).
struct GroupParameters {
  uint32_t scale = 0;
  uint32_t min = 0;
  uint32_t super = 0;
};

// A rectangle of quantized weights: codes [rows, code_stride] one byte each, and for every group
// that the rectangle's columns touch, found by absolute column:
//   group of column c of the rectangle = (first_column + c) / group_columns
//                                        - first_column / group_columns
struct QuantizedView {
  const uint8_t* codes = nullptr;
  uint64_t code_stride = 0;
  const GroupParameters* groups = nullptr;
  uint64_t group_stride = 0;  // groups between two rows
  uint32_t group_columns = 0;
  uint32_t first_column = 0;  // absolute column of codes[0]
};

// Groups that columns [begin, end) of a row touch.
constexpr uint32_t GroupsTouched(uint32_t begin, uint32_t end, uint32_t group_columns) {
  if (begin == end) return 0;
  if (group_columns == 0) return 1;
  return (end - 1) / group_columns - begin / group_columns + 1;
}

inline constexpr uint32_t kSuperBlockColumns = 256;

// Internal linkage, so that kernel objects hold no weak symbols.
constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr int8_t kIq4NlValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};

}  // namespace tandem
