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

// The table's two lines, and the object that --json writes.
std::string FormatEvalTable(const ExpertStorage& experts, const EvalResult& result);
EvalJson EvalToJson(const std::string& model, const ExpertStorage& experts,
                    const EvalResult& result);

int RunEval(const EvalOptions& options);

}  // namespace tandem
