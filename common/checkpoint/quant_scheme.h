#pragma once

// What a model's quantization_config says, as plain data. It gives what the tensors cannot show
// (block and group sizes, bits, how zero points are stored); which module is quantized, and by
// which of the listed schemes, is decided by the tensors that the files hold, never by the config's
// list of ignored modules: those lists are often wrong, the files never.

#include <cstdint>
#include <vector>

namespace tandem {

enum class QuantMethod : uint8_t {
  kNone = 0,
  kFp8 = 1,                // DeepSeek, Qwen: E4M3 with blocks, channels or one scale
  kMxfp8 = 2,              // MiniMax-M3: E4M3 with an E8M0 scale every 32 inputs
  kMxfp4 = 3,              // gpt-oss
  kCompressedTensors = 4,  // every format of it that `weights` can describe
  kAwq = 5,                // GEMM order
  kGptq = 6,
  kModelOpt = 7,  // NVFP4 and FP8
};

// Rows and columns that share an FP8 scale.
struct ScaleBlock {
  int64_t rows = 128;
  int64_t cols = 128;
};

// How one set of linears is quantized: a config group of compressed-tensors, or the only one of AWQ
// and GPTQ.
struct QuantizedWeights {
  int bits = 4;
  int64_t group_columns = 0;  // 0: one scale a row, or one a tensor
  bool symmetric = true;      // no zero points, or (GPTQ) only the middle one
};

struct QuantScheme {
  QuantMethod method = QuantMethod::kNone;
  ScaleBlock block;                       // FP8; 128 x 128, the only published size, by default
  std::vector<QuantizedWeights> weights;  // integer formats of compressed-tensors, AWQ, GPTQ
  bool zero_minus_one = true;             // GPTQ v1 stores each zero point less one
};

}  // namespace tandem
