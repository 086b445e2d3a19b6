#pragma once

// Exit codes of our processes and commands.

#include "absl/status/status.h"

namespace tandem {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,
  kExitUsage = 2,
  kExitAddressInUse = 3,
  kExitBadModel = 4,
};

// Prints why a command did nothing and returns its exit code: what is wrong with a model has one of
// its own.
int PrintRefusal(const absl::Status& status);

}  // namespace tandem
