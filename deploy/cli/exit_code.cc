#include "deploy/cli/exit_code.h"

#include <iostream>

namespace tandem {

int PrintRefusal(const absl::Status& status) {
  std::cerr << "tandem: " << status.message() << "\n";
  return absl::IsInvalidArgument(status) || absl::IsDataLoss(status) || absl::IsNotFound(status) ||
                 absl::IsUnimplemented(status)
             ? kExitBadModel
             : kExitFailure;
}

}  // namespace tandem
