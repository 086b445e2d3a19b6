#pragma once

// Request ids, which clients may choose and which appear in responses and logs. Thread-safe.

#include <string>
#include <string_view>

namespace tandem::gateway {

std::string NewRequestId();

// Fit to be echoed in a header and logged: 1 to 128 printable characters without blanks, quotes and
// backslashes.
bool IsRequestId(std::string_view id);

}  // namespace tandem::gateway
