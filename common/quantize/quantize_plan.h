#pragma once

// What `tandem quantize` makes of a checkpoint, decided before anything is written: for every
// tensor of every file whether it is quantized, copied or (FP8 of the source that is not quantized
// again) written as BF16, the tensors of the output files, and the quantization_config that
// describes them to transformers, vLLM and our own reader. Pure: reads headers and the config only.
//
// Tensors are chosen by the hub's names, so families that cannot be served can be quantized too:
// a routed expert's linear is "....experts.<number>.<name>.weight".

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/quant_scheme.h"
#include "common/quantize/encode.h"
#include "common/quantize/safetensors_writer.h"

namespace tandem {

enum class QuantizeScope : uint8_t {
  kExperts,  // the linears of routed experts
  kLinears,  // all linears of the layers but routers
};

struct QuantizeItem {
  enum class Action : uint8_t { kCopy, kWriteBf16, kQuantize };

  Action action = Action::kCopy;
  const Checkpoint::Tensor* source = nullptr;
  size_t first_output = 0;             // of its tensors in the file
  std::optional<EncodeTarget> target;  // kQuantize: with the group that divides its columns

  // The tensor's name without ".weight". REQUIRES: action is not kCopy.
  std::string_view module() const;
};

struct QuantizeFile {
  std::string name;  // "model-00001-of-00002.safetensors"
  std::vector<QuantizeItem> items;
  std::vector<TensorToWrite> outputs;

  uint64_t OutputBytes() const;
};

struct QuantizePlan {
  std::vector<QuantizeFile> files;
  nlohmann::ordered_json config;  // config.json of the output
  QuantScheme source_scheme;
  uint64_t quantized_matrices = 0;
  uint64_t source_bytes = 0;            // of all tensors read
  uint64_t quantized_source_bytes = 0;  // of the quantized ones, before
  uint64_t quantized_output_bytes = 0;  // and after
};

bool IsRoutedExpertWeight(std::string_view tensor_name);
// Linears of layers, routed experts included; not routers, embeddings and heads.
bool IsLayerLinearWeight(std::string_view tensor_name);

// `config` is the source's config.json. Errors, by file and tensor or key: a source quantized
// otherwise than FP8, experts fused in one tensor, columns that no group divides, nothing to
// quantize.
absl::StatusOr<QuantizePlan> PlanQuantize(const Checkpoint& checkpoint,
                                          const nlohmann::ordered_json& config,
                                          const EncodeTarget& target, QuantizeScope scope);

}  // namespace tandem
