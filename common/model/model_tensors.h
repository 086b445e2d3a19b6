#pragma once

// Which tensors a model needs and whether a checkpoint holds them: run before anything is loaded,
// so that an incomplete or mismatched checkpoint is refused in seconds, not after the load.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model_spec.h"

namespace tandem {

enum class TensorRole : uint8_t {
  kEmbedding,  // [vocab, hidden], the head included
  kVector,     // norms and biases; never quantized
  kLinear,     // read through WeightMatrix
  kRouted,     // a routed expert's linear: the expert workers load it
};

struct RequiredTensor {
  std::string name;
  std::vector<int64_t> shape;
  TensorRole role = TensorRole::kLinear;
};

// Every tensor that the forward pass reads, in order of the layers; a tied head is not listed
// twice.
std::vector<RequiredTensor> RequiredTensors(const ModelSpec& spec);

// Refuses a checkpoint that lacks a required tensor (one error: the first missing and how many) or
// holds one of another shape or an unusable dtype. Surplus tensors are not an error.
absl::Status CheckTensors(const Checkpoint& checkpoint, const ModelSpec& spec);

// Bytes of the required tensors of `role` as the files hold them, scales included. REQUIRES:
// CheckTensors was OK.
uint64_t StoredBytes(const Checkpoint& checkpoint, const ModelSpec& spec, TensorRole role);

// Identifies config and weights for packed caches and for the handshake between processes: covers
// the spec, and name, dtype, shape and place of every tensor, and size and mtime of every file. Not
// the weights themselves: reading hundreds of GB for it would defeat a quick restart.
uint64_t ModelHash(const Checkpoint& checkpoint, const ModelSpec& spec);

// `pattern` with the expert's index in place of its "%d". REQUIRES: it holds one.
std::string ExpertTensorName(const std::string& pattern, int expert);

}  // namespace tandem
