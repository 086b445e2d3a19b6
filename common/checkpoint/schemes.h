#pragma once

// From the name of a weight to the tensors that hold it: the list of quantization schemes. Which
// one applies is decided by the names and types of the tensors that exist:
//
//   x.weight          F32, F16, BF16      plain
//                     F8_E4M3             FP8 or MXFP8, by the scales beside it
//                     I8 [n, k]           INT8, compressed-tensors int-quantized
//                     I8 [n, k/2]         MXFP4 of DeepSeek-V4
//                     U8 [n, k/2]         NVFP4 of ModelOpt
//   x.weight_packed   I32                 compressed-tensors pack-quantized
//                     U8                  its mxfp4- and nvfp4-pack-quantized, by the scales
//   x.qweight         I32                 AWQ or GPTQ, by the config
//   x_blocks          U8                  MXFP4 of gpt-oss
//
// Definitions: notes/models.md section 5. A scheme is one function that checks shapes and describes
// the layout; the two layouts there are (row_major.h, input_major.h) read them all.
//
// Thread safety: functions of immutable data. Errors name file, tensor and what was expected.

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/matrix_source.h"
#include "common/checkpoint/quant_scheme.h"

namespace tandem {

struct MatrixRequest {
  const Checkpoint& checkpoint;
  std::string_view weight_name;
  int64_t rows = 0;
  int64_t cols = 0;
  const QuantScheme& scheme;
  FusedRows fused;
};

absl::StatusOr<std::shared_ptr<const MatrixSource>> OpenMatrix(const MatrixRequest& request);

// The tensor that holds the elements or codes of a weight; null when there is none.
const Checkpoint::Tensor* FindWeight(const Checkpoint& checkpoint, std::string_view weight_name);

}  // namespace tandem
