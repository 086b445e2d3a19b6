#pragma once

// A model directory quantized into another one: weights as PlanQuantize decides, in files of the
// source's names, with index and config.json; everything else of the directory (tokenizer, chat
// template, generation config) copied. The output is written under a temporary name beside its
// place and renamed when it is complete, so that a directory of the output's name is always whole.
//
// All cores work, in pieces of 128 rows: memory stays at a few MB a core whatever the model's size.
// Thread safety: a function; `progress` is called by one thread at a time.
// Errors name file and tensor or directory: NaN or infinite weights, a directory that exists, too
// little space (checked before anything is written), CANCELLED when `progress` says so. After an
// error nothing is left behind and an older output is untouched.

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "common/quantize/encode.h"
#include "common/quantize/quantize_plan.h"

namespace tandem {

struct QuantizeRequest {
  std::string model_dir;
  std::string output_dir;
  EncodeTarget target;
  QuantizeScope scope = QuantizeScope::kExperts;
  bool overwrite = false;  // replace an output directory that holds a model
};

struct QuantizeReport {
  uint64_t matrices = 0;
  uint64_t matrix_bytes_before = 0;  // of the quantized matrices
  uint64_t matrix_bytes_after = 0;
  uint64_t weight_bytes = 0;  // all weight files of the output
  EncodeLoss loss;            // of the quantized matrices together
  std::string worst_matrix;   // the one with the largest relative loss
  double worst_loss = 0;
};

// Source bytes read so far and in all; false cancels.
using QuantizeProgress = std::function<bool(uint64_t done_bytes, uint64_t total_bytes)>;

absl::StatusOr<QuantizeReport> QuantizeCheckpoint(const QuantizeRequest& request,
                                                  const QuantizeProgress& progress);

}  // namespace tandem
