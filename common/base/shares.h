#pragma once

// Relative shares of expert workers ("3,1": the first owns three quarters of every expert).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

// One number a worker, each 0 to 1,000,000, not all 0; none given: all equal. Errors:
// INVALID_ARGUMENT naming `option` when a text is no such number or the count differs from
// `workers`.
absl::StatusOr<std::vector<uint32_t>> ParseShares(const std::vector<std::string>& texts,
                                                  size_t workers, std::string_view option);

}  // namespace tandem
