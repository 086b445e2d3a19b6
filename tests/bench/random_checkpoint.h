#pragma once

// Writes a model directory of any family that config.json can describe, with random weights: so
// that models of a realistic shape can be loaded, run and compared without being downloaded.
//
// Matrices have a standard deviation of 1 / sqrt(inputs), norms are 1: activations keep their size
// from layer to layer. Routed experts may be quantized (random codes, a scale that gives the same
// deviation), in the layout that `tandem quantize` writes.
//
// The output appears under its name when it is complete. All cores work. Errors: those of the
// config, of the file system, and formats that do not fit the shapes.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/quantize/encode.h"

namespace tandem::bench {

struct RandomCheckpointRequest {
  std::string config_file;
  std::string output_dir;
  // Its files other than weights and config.json are copied (tokenizer, chat template); may be
  // empty.
  std::string tokenizer_dir;
  std::optional<EncodeTarget> experts;  // none: BF16
  uint64_t seed = 1;
  uint64_t max_file_bytes = 5'000'000'000;
  bool overwrite = false;
};

struct RandomCheckpointReport {
  uint64_t tensors = 0;
  uint64_t bytes = 0;
  int files = 0;
};

absl::StatusOr<RandomCheckpointReport> WriteRandomCheckpoint(
    const RandomCheckpointRequest& request);

}  // namespace tandem::bench
