#pragma once

// A step's sampling inputs, for the tests of the sampler.

#include <vector>

#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {

struct SampleStep {
  int64_t vocab = 0;
  std::vector<float> logits;  // [rows, vocab]; adjusted in place by Run
  std::vector<SampleParams> params;
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  std::vector<int32_t> banned_ids;
  std::vector<uint32_t> token_counts;

  // One row.
  SampleStep(std::vector<float> row, SampleParams row_params)
      : vocab(static_cast<int64_t>(row.size())), logits(std::move(row)), params{row_params} {}

  void AddRow(const std::vector<float>& row, const SampleParams& row_params) {
    logits.insert(logits.end(), row.begin(), row.end());
    params.push_back(row_params);
  }

  std::vector<int32_t> Run(Backend& backend) {
    std::vector<int32_t> tokens(params.size(), -7);
    SampleArgs args;
    args.rows.bound = static_cast<int>(params.size());
    args.logits = AsMatrix(logits, vocab);
    args.vocab = vocab;
    args.params = params.data();
    args.bias_ids = bias_ids.data();
    args.bias_values = bias_values.data();
    args.banned_ids = banned_ids.data();
    args.token_counts = token_counts.data();
    args.tokens = tokens.data();
    backend.Sample(args);
    return tokens;
  }
};

}  // namespace tandem::gpu
