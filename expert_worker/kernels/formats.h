#pragma once

// How each weight format is packed and which arithmetic multiplies it: one line a format. Kernels
// are templates over a line; nothing else knows a format by name. Adding a format is a line here
// (and its definition in common/tensor/weight_format.h).
//
// A packed matrix is cut into panels of kPanelWidth = 32 outputs. A panel is one stream of bytes,
// so that memory is read in one direction (a second stream for scales costs a third of the speed):
//   head    [32] row supers (SuperType::kF32Row), then, where group_columns is 0, [32] scales and
//           [32] mins
//   blocks  of kBlockInputs = 256 inputs, the last one of what is left; each
//     super   [32]           per SuperType
//     scales  [groups][32]   per ScaleType, pairs [groups / 2][32][2]; groups = ceil(inputs /
//                            group_columns)
//     mins    [groups][32]   per MinType
//     planes  the codes' upper bits, per CodeStorage: first the bit plane, then the two-bit plane
//     codes   steps of inputs, per CodeStorage
// Each region is rounded up to 64 bytes, the inputs of a block to kStepAlign.
// Bytes of a step of four inputs j .. j + 3 ("dot step", the operand order of vpdpbusd, of
// vpmaddubsw pairs and of AMX tiles): byte 4 * (o % 16) + i is output o, input j + i.
//   k8   128 bytes: outputs 0-15, then 16-31. Signed codes are stored + 128, their offset.
//   k4    64 bytes: outputs 0-15 in the low nibbles, 16-31 in the high ones.
//   k5    k4, and a bit plane, 64 bytes for four steps: bit f of a byte is bit 4 of a code of step
//         f / 2, half f % 2.
//   k6    k4, and a plane of two bits a code, 64 bytes for two steps: field f of a byte (bits 2f,
//         2f + 1) belongs to step f / 2, half f % 2.
//   k2    the plane of k6 alone.
//   k3    the bit plane of k5 (bit 2) and the plane of k6.
// Floating-point codes are stored by input:
//   kF32  128 bytes an input.   kF16  64 bytes an input.   kE4m3  32 bytes an input.
//   kBf16 128 bytes for two inputs: dword o % 16 of half o / 16 holds input j in its low half and
//         j + 1 in its high half (the operand order of vdpbf16ps and of AMX tiles).
// What pads a panel (outputs beyond n, inputs beyond k) is zero bytes; activations that meet padded
// inputs are zero.
//
// Pure functions; tables are constexpr.

#include <cstddef>
#include <cstdint>

#include "common/tensor/weight_format.h"

namespace tandem::kernels {

inline constexpr uint32_t kPanelWidth = 32;
// Alignment of packed data and of a panel's regions.
inline constexpr size_t kPackAlignment = 64;
// Inputs of a panel are padded to this: the largest dot group.
inline constexpr uint32_t kStepAlign = 32;

enum class CodeStorage : uint8_t { kF32, kBf16, kF16, kE4m3, k8, k4, k5, k6, k2, k3 };
enum class CodeMap : uint8_t { kFloat, kLinear, kE2m1, kIq4Nl };
// Pairs: the bytes of two groups alternate, output by output. U4: the scale is the low nibble of a
// byte, the minimum the high one.
enum class ScaleType : uint8_t {
  kNone,
  kF32,
  kBf16,
  kF16,
  kE8m0,
  kE4m3,
  kU8,
  kI8,
  kI8Pair,
  kU4Pair
};
enum class MinType : uint8_t { kNone, kF16, kZeroPoint, kU8, kU4 };
enum class SuperType : uint8_t { kNone, kF16, kF16Pair, kF32Row };

struct FormatTraits {
  WeightFormat format;
  CodeStorage codes;
  CodeMap map;
  // Signed integer of a code: (stored code, or 2 * e2m1 + 16, or the IQ4_NL table + 128) - offset;
  // a power of two or 0.
  uint8_t offset;
  ScaleType scale;
  MinType min;
  SuperType super;
  // Inputs that are summed in integers before scales apply; group_columns is a multiple of it.
  uint8_t dot_group;
};

// Offsets: 0 where a zero point or minimum does the shifting.
constexpr FormatTraits kFormats[] = {
    {WeightFormat::kF32, CodeStorage::kF32, CodeMap::kFloat, 0, ScaleType::kNone, MinType::kNone,
     SuperType::kNone, 0},
    {WeightFormat::kBf16, CodeStorage::kBf16, CodeMap::kFloat, 0, ScaleType::kNone, MinType::kNone,
     SuperType::kNone, 0},
    {WeightFormat::kF16, CodeStorage::kF16, CodeMap::kFloat, 0, ScaleType::kNone, MinType::kNone,
     SuperType::kNone, 0},
    {WeightFormat::kFp8, CodeStorage::kE4m3, CodeMap::kFloat, 0, ScaleType::kF32, MinType::kNone,
     SuperType::kNone, 0},
    {WeightFormat::kMxfp8, CodeStorage::kE4m3, CodeMap::kFloat, 0, ScaleType::kE8m0, MinType::kNone,
     SuperType::kNone, 0},
    {WeightFormat::kInt8F32, CodeStorage::k8, CodeMap::kLinear, 128, ScaleType::kF32,
     MinType::kNone, SuperType::kNone, 32},
    {WeightFormat::kInt8Bf16, CodeStorage::k8, CodeMap::kLinear, 128, ScaleType::kBf16,
     MinType::kNone, SuperType::kNone, 32},
    {WeightFormat::kInt8F16, CodeStorage::k8, CodeMap::kLinear, 128, ScaleType::kF16,
     MinType::kNone, SuperType::kNone, 32},
    {WeightFormat::kInt4F32, CodeStorage::k4, CodeMap::kLinear, 8, ScaleType::kF32, MinType::kNone,
     SuperType::kNone, 32},
    {WeightFormat::kInt4Bf16, CodeStorage::k4, CodeMap::kLinear, 8, ScaleType::kBf16,
     MinType::kNone, SuperType::kNone, 32},
    {WeightFormat::kInt4F16, CodeStorage::k4, CodeMap::kLinear, 8, ScaleType::kF16, MinType::kNone,
     SuperType::kNone, 32},
    {WeightFormat::kInt4ZeroF32, CodeStorage::k4, CodeMap::kLinear, 0, ScaleType::kF32,
     MinType::kZeroPoint, SuperType::kNone, 32},
    {WeightFormat::kInt4ZeroBf16, CodeStorage::k4, CodeMap::kLinear, 0, ScaleType::kBf16,
     MinType::kZeroPoint, SuperType::kNone, 32},
    {WeightFormat::kInt4ZeroF16, CodeStorage::k4, CodeMap::kLinear, 0, ScaleType::kF16,
     MinType::kZeroPoint, SuperType::kNone, 32},
    {WeightFormat::kMxfp4, CodeStorage::k4, CodeMap::kE2m1, 16, ScaleType::kE8m0, MinType::kNone,
     SuperType::kNone, 32},
    {WeightFormat::kNvfp4, CodeStorage::k4, CodeMap::kE2m1, 16, ScaleType::kE4m3, MinType::kNone,
     SuperType::kF32Row, 16},
    {WeightFormat::kQ4_1, CodeStorage::k4, CodeMap::kLinear, 0, ScaleType::kF16, MinType::kF16,
     SuperType::kNone, 32},
    {WeightFormat::kQ5_0, CodeStorage::k5, CodeMap::kLinear, 16, ScaleType::kF16, MinType::kNone,
     SuperType::kNone, 32},
    {WeightFormat::kQ5_1, CodeStorage::k5, CodeMap::kLinear, 0, ScaleType::kF16, MinType::kF16,
     SuperType::kNone, 32},
    {WeightFormat::kQ2K, CodeStorage::k2, CodeMap::kLinear, 0, ScaleType::kU4Pair, MinType::kU4,
     SuperType::kF16Pair, 16},
    {WeightFormat::kQ3K, CodeStorage::k3, CodeMap::kLinear, 4, ScaleType::kI8Pair, MinType::kNone,
     SuperType::kF16, 16},
    {WeightFormat::kQ4K, CodeStorage::k4, CodeMap::kLinear, 0, ScaleType::kU8, MinType::kU8,
     SuperType::kF16Pair, 32},
    {WeightFormat::kQ5K, CodeStorage::k5, CodeMap::kLinear, 0, ScaleType::kU8, MinType::kU8,
     SuperType::kF16Pair, 32},
    {WeightFormat::kQ6K, CodeStorage::k6, CodeMap::kLinear, 32, ScaleType::kI8, MinType::kNone,
     SuperType::kF16, 16},
    {WeightFormat::kIq4Nl, CodeStorage::k4, CodeMap::kIq4Nl, 128, ScaleType::kF16, MinType::kNone,
     SuperType::kNone, 32},
    {WeightFormat::kIq4Xs, CodeStorage::k4, CodeMap::kIq4Nl, 128, ScaleType::kI8, MinType::kNone,
     SuperType::kF16, 32},
    {WeightFormat::kInt8ZeroF32, CodeStorage::k8, CodeMap::kLinear, 0, ScaleType::kF32,
     MinType::kZeroPoint, SuperType::kNone, 32},
    {WeightFormat::kInt8ZeroBf16, CodeStorage::k8, CodeMap::kLinear, 0, ScaleType::kBf16,
     MinType::kZeroPoint, SuperType::kNone, 32},
    {WeightFormat::kInt8ZeroF16, CodeStorage::k8, CodeMap::kLinear, 0, ScaleType::kF16,
     MinType::kZeroPoint, SuperType::kNone, 32},
};

// Names of formats in options, logs and benchmarks, by format.
constexpr const char* kFormatNames[] = {
    "f32",        "bf16",      "f16",       "fp8",        "mxfp8",    "int8_f32",
    "int8_bf16",  "int8_f16",  "int4_f32",  "int4_bf16",  "int4_f16", "int4z_f32",
    "int4z_bf16", "int4z_f16", "mxfp4",     "nvfp4",      "q4_1",     "q5_0",
    "q5_1",       "q2_k",      "q3_k",      "q4_k",       "q5_k",     "q6_k",
    "iq4_nl",     "iq4_xs",    "int8z_f32", "int8z_bf16", "int8z_f16"};

inline constexpr uint32_t kFormatCount = static_cast<uint32_t>(WeightFormat::kCount);

constexpr const FormatTraits& TraitsOf(WeightFormat format) {
  return kFormats[static_cast<uint32_t>(format)];
}

constexpr bool FormatsAreInOrder() {
  for (uint32_t i = 0; i < kFormatCount; ++i) {
    if (static_cast<uint32_t>(kFormats[i].format) != i) return false;
  }
  return sizeof(kFormats) / sizeof(kFormats[0]) == kFormatCount &&
         sizeof(kFormatNames) / sizeof(kFormatNames[0]) == kFormatCount;
}
static_assert(FormatsAreInOrder());

constexpr uint32_t ScaleBytes(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
      return 0;
    case ScaleType::kF32:
      return 4;
    case ScaleType::kBf16:
    case ScaleType::kF16:
      return 2;
    default:
      return 1;
  }
}

constexpr bool HasScalePairs(const FormatTraits& t) {
  return t.scale == ScaleType::kI8Pair || t.scale == ScaleType::kU4Pair;
}

// Where the scale of a block's group and of output `o` is, from the block's scales on.
constexpr size_t ScaleOffset(const FormatTraits& t, uint32_t group, uint32_t o) {
  return HasScalePairs(t) ? size_t{group / 2} * 2 * kPanelWidth + 2 * o + group % 2
                          : (size_t{group} * kPanelWidth + o) * ScaleBytes(t.scale);
}

constexpr uint32_t MinBytes(MinType type) {
  // Of kU4 the scale's byte holds both.
  return type == MinType::kNone || type == MinType::kU4 ? 0 : type == MinType::kF16 ? 2 : 1;
}

// A minimum is an integer times the block's dmin.
constexpr bool HasSuperMin(const FormatTraits& t) {
  return t.min == MinType::kU8 || t.min == MinType::kU4;
}

constexpr uint32_t SuperBytes(SuperType type) {
  return type == SuperType::kNone ? 0 : type == SuperType::kF16 ? 2 : 4;
}

// Inputs of a block: a super-block of the K-quants.
inline constexpr uint32_t kBlockInputs = 256;
static_assert(kBlockInputs == kSuperBlockColumns);

// Inputs whose int8 activations share a scale: a dot group, or, where weights have super scales,
// the whole block (llama.cpp does so for all K-quants and IQ4_XS; NVFP4's own activations have four
// bits): a group's sum is then multiplied by the weights' scale alone.
constexpr uint32_t ActivationGroup(const FormatTraits& t) {
  return t.super == SuperType::kNone ? t.dot_group : kBlockInputs;
}

// Where the regions of a block begin, in bytes from the block.
struct BlockGeometry {
  uint32_t inputs;  // not padded
  uint32_t groups;
  size_t scales;
  size_t mins;
  size_t bit_plane;
  size_t plane;
  size_t codes;
  size_t bytes;
};

struct PanelGeometry {
  uint32_t padded_k;   // k rounded up to kStepAlign
  uint32_t blocks;     // all but the last are `full`
  size_t head_scales;  // in bytes from the panel; used where group_columns is 0
  size_t head_mins;
  size_t head_bytes;
  BlockGeometry full;
  BlockGeometry last;
  size_t bytes;

  const BlockGeometry& Block(uint32_t b) const { return b + 1 == blocks ? last : full; }
  size_t BlockOffset(uint32_t b) const { return head_bytes + b * full.bytes; }
};

constexpr size_t RoundUpTo(size_t value, size_t step) { return (value + step - 1) / step * step; }

// Not inline: a copy compiled for a later instruction set must not be taken for everybody's.
PanelGeometry GeometryOf(WeightFormat format, uint32_t k, uint32_t group_columns);

}  // namespace tandem::kernels
