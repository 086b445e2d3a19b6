// Feeds the safetensors header parser. The first byte chooses: 0 takes the rest as a file's bytes;
// otherwise the rest is the JSON header alone, given a right length and (byte - 1) * 4 bytes of
// data, so that mutations reach the checks behind the length.
//
// Run: safetensors_fuzz -runs=100000 -max_len=4096

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/check.h"
#include "common/checkpoint/safetensors.h"
#include "tests/testing/safetensors_builder.h"

namespace {

void ParseAndCheck(std::string_view bytes) {
  const auto entries = tandem::ParseSafetensorsHeader("fuzz", bytes, bytes.size());
  if (!entries.ok()) {
    TANDEM_CHECK(!entries.status().message().empty());
    return;
  }
  uint64_t at = entries->empty() ? bytes.size() : entries->front().begin;
  for (const tandem::SafetensorsEntry& entry : *entries) {
    TANDEM_CHECK(entry.begin == at && entry.end >= entry.begin && entry.end <= bytes.size());
    uint64_t size = tandem::DTypeBytes(entry.dtype);
    for (int64_t dim : entry.shape) size *= static_cast<uint64_t>(dim);
    TANDEM_CHECK(size == entry.end - entry.begin);
    at = entry.end;
  }
  TANDEM_CHECK(at == bytes.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 0) {
    ParseAndCheck(rest);
  } else {
    const std::string payload(size_t{data[0] - 1u} * 4, '\0');
    ParseAndCheck(tandem::testing::SafetensorsBytes(rest, payload));
  }
  return 0;
}
