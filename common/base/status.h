#pragma once

// Early-return macros for absl::Status and absl::StatusOr, and annotation of errors on their way
// up.

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

// Returns `status` with "`context`: " put before its message; an OK status is returned as it is.
absl::Status Annotate(const absl::Status& status, std::string_view context);

}  // namespace tandem

#define TANDEM_CONCAT_INNER(a, b) a##b
#define TANDEM_CONCAT(a, b) TANDEM_CONCAT_INNER(a, b)

// Returns from the enclosing function if `expr` (an absl::Status) is not OK.
#define RETURN_IF_ERROR(expr)                      \
  do {                                             \
    absl::Status tandem_status = (expr);           \
    if (!tandem_status.ok()) return tandem_status; \
  } while (false)

// ASSIGN_OR_RETURN(auto x, F()): x is F()'s value, or the enclosing function returns F()'s error.
#define ASSIGN_OR_RETURN(lhs, expr) \
  TANDEM_ASSIGN_OR_RETURN(TANDEM_CONCAT(tandem_statusor_, __LINE__), lhs, expr)
#define TANDEM_ASSIGN_OR_RETURN(tmp, lhs, expr) \
  auto tmp = (expr);                            \
  if (!tmp.ok()) return tmp.status();           \
  lhs = std::move(tmp).value()
