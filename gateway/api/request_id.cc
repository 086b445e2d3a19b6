#include "gateway/api/request_id.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {

std::string NewRequestId() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return absl::StrCat("req-", absl::Hex(generator(), absl::kZeroPad16));
}

bool IsRequestId(std::string_view id) {
  constexpr size_t kMaxBytes = 128;
  return !id.empty() && id.size() <= kMaxBytes && std::all_of(id.begin(), id.end(), [](char c) {
    return c > ' ' && c < 0x7f && c != '"' && c != '\\';
  });
}

}  // namespace tandem::gateway
