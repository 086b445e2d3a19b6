#pragma once

// `tandem quantize`: options to a QuantizeRequest, progress, and what was gained and lost.

#include <string>

#include "absl/status/statusor.h"
#include "common/base/options.h"
#include "common/quantize/encode.h"

namespace tandem {

struct QuantizeOptions {
  std::string model;  // directory; the shipped model by default
  std::string output;
  std::string format = "int4";
  std::string group = "auto";
  std::string scope = "experts";
  bool overwrite = false;

  QuantizeOptions();
  void Register(OptionParser& parser);
};

// What format and group mean together. Errors: INVALID_ARGUMENT naming a pair that does not exist.
absl::StatusOr<EncodeTarget> ParseTarget(const std::string& format, const std::string& group);

// Returns the exit code; SIGINT and SIGTERM end it without an output. REQUIRES: no other thread
// runs yet.
int RunQuantize(const QuantizeOptions& options);

}  // namespace tandem
