#include "common/base/status.h"

#include <string>

namespace tandem {

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  std::string message(context);
  message += ": ";
  message += std::string_view(status.message().data(), status.message().size());
  return absl::Status(status.code(), message);
}

}  // namespace tandem
