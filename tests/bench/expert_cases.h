#pragma once

// What the routed-expert benchmark runs over: shapes of published models and weight formats, one
// line each. Plain data.

#include <cstdint>

#include "common/tensor/weight_format.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::bench {

struct ExpertShape {
  const char* name;
  uint32_t experts;
  uint32_t top_k;
  uint32_t hidden;
  uint32_t intermediate;
  kernels::SwigluClamp activation = {};
  bool biases = false;
};

inline constexpr kernels::SwigluClamp kGptOssActivation{7.0f, 1.702f, 1.0f};

inline constexpr ExpertShape kExpertShapes[] = {
    {"qwen3-30b", 128, 8, 2048, 768},
    {"deepseek-v3", 256, 8, 7168, 2048},
    {"gpt-oss-20b", 32, 4, 2880, 2880, kGptOssActivation, true},
    {"gpt-oss-120b", 128, 4, 2880, 2880, kGptOssActivation, true},
};

struct FormatCase {
  const char* name;
  WeightFormat format;
  uint32_t group_columns;  // of quantized formats; 0: a scale an output
};

inline constexpr FormatCase kFormatCases[] = {
    {"f32", WeightFormat::kF32, 0},
    {"bf16", WeightFormat::kBf16, 0},
    {"f16", WeightFormat::kF16, 0},
    {"fp8-block", WeightFormat::kFp8, 128},
    {"fp8-channel", WeightFormat::kFp8, 0},
    {"mxfp8", WeightFormat::kMxfp8, 32},
    {"int8-channel", WeightFormat::kInt8Bf16, 0},
    {"int8-g128", WeightFormat::kInt8Bf16, 128},
    {"int4-g32", WeightFormat::kInt4Bf16, 32},
    {"int4-g64", WeightFormat::kInt4Bf16, 64},
    {"int4-g128", WeightFormat::kInt4Bf16, 128},
    {"int4-zero-g128", WeightFormat::kInt4ZeroF16, 128},
    {"mxfp4", WeightFormat::kMxfp4, 32},
    {"nvfp4", WeightFormat::kNvfp4, 16},
    {"q4_0", WeightFormat::kInt4F16, 32},
    {"q4_1", WeightFormat::kQ4_1, 32},
    {"q5_0", WeightFormat::kQ5_0, 32},
    {"q5_1", WeightFormat::kQ5_1, 32},
    {"q8_0", WeightFormat::kInt8F16, 32},
    {"q2_k", WeightFormat::kQ2K, 16},
    {"q3_k", WeightFormat::kQ3K, 16},
    {"q4_k", WeightFormat::kQ4K, 32},
    {"q5_k", WeightFormat::kQ5K, 32},
    {"q6_k", WeightFormat::kQ6K, 16},
    {"iq4_nl", WeightFormat::kIq4Nl, 32},
    {"iq4_xs", WeightFormat::kIq4Xs, 32},
};

inline constexpr uint32_t kRowCounts[] = {1, 2, 4, 8, 16, 32, 64, 128, 512};

}  // namespace tandem::bench
