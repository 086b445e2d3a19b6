#pragma once

// The tokenizer that a GGUF file carries (keys tokenizer.*), as the same plain data that a
// tokenizer.json and a tokenizer_config.json give. The file names its splitting pattern instead of
// holding it ("tokenizer.ggml.pre"): a table here says what the names mean.
//
// Errors name file and key. NOT_FOUND: the file has no tokenizer; UNIMPLEMENTED: a model other than
// byte-level BPE ("gpt2"), or a pattern name that the table lacks (the message lists the known);
// INVALID_ARGUMENT: broken contents.

#include "absl/status/statusor.h"
#include "common/checkpoint/gguf.h"
#include "gateway/text/tokenizer_config.h"
#include "gateway/text/tokenizer_spec.h"

namespace tandem::gateway {

struct GgufTokenizer {
  TokenizerSpec spec;  // points into the model
  TokenizerConfig config;
};

absl::StatusOr<GgufTokenizer> ReadGgufTokenizer(const GgufModel& model);

}  // namespace tandem::gateway
