#pragma once

// `tandem eval`: starts a server for a model, or talks to a running one, and prints what the
// model's format costs and gives: bytes of the experts, speed, perplexity, accuracy.

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "common/base/options.h"
#include "deploy/cli/evaluation.h"
#include "deploy/cli/serve_options.h"

namespace tandem {

struct EvalOptions {
  ServeOptions serve;
  std::string url;    // of a running server; empty: start one
  std::string tasks;  // directory of the sets; empty: the model's
  std::string json;   // file for the result
  int streams = 8;
  int speed_tokens = 128;

  EvalOptions();
  void Register(OptionParser& parser);
};

// How a checkpoint holds its routed experts; a dense model has none.
struct ExpertStorage {
  std::string format = "none";  // "bf16", "int4 g32", "int8 channel"
  uint64_t bytes = 0;           // scales included
};

absl::StatusOr<ExpertStorage> DescribeExperts(const std::string& model);

struct EvalReport {
  std::string model;
  ExpertStorage experts;
  int streams = 0;
  // What computed the experts; empty and 0 where a server that ran already does not say.
  std::string kernels;
  uint32_t threads = 0;
  EvalResult result;
};

// A table of one row and what its speeds were measured with, and the object that --json writes.
std::string FormatEvalTable(const EvalReport& report);
EvalJson EvalToJson(const EvalReport& report);

int RunEval(const EvalOptions& options);

}  // namespace tandem
