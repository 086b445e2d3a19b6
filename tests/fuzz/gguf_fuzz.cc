// Feeds the GGUF parser. The first byte chooses: 0 takes the rest as a file's bytes; otherwise the
// rest follows a right header with one tensor and (byte mod 8) key/values, so that mutations reach
// the checks behind the counts.
//
// Run: gguf_fuzz -runs=100000 -max_len=4096

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/check.h"
#include "common/checkpoint/gguf.h"
#include "common/checkpoint/gguf_blocks.h"
#include "tests/testing/gguf_builder.h"

namespace {

void ParseAndRead(std::string_view bytes) {
  const auto contents = tandem::ParseGguf("fuzz", bytes);
  if (!contents.ok()) {
    TANDEM_CHECK(!contents.status().message().empty());
    return;
  }
  const auto* const begin = reinterpret_cast<const uint8_t*>(bytes.data());
  for (const tandem::GgufTensor& tensor : contents->tensors) {
    TANDEM_CHECK(tensor.data >= begin && tensor.data + tensor.bytes <= begin + bytes.size());
    const auto& format = tandem::FormatOf(tensor.type->type);
    if (format.unpack == nullptr) continue;
    uint8_t codes[256];
    tandem::GroupParameters groups[16];
    for (uint64_t at = 0; at < tensor.bytes; at += tensor.type->block_bytes) {
      format.unpack(tensor.data + at, codes, groups);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 0) {
    ParseAndRead(rest);
  } else {
    using tandem::testing::LittleEndian;
    ParseAndRead("GGUF" + LittleEndian<uint32_t>(3) + LittleEndian<uint64_t>(1) +
                 LittleEndian<uint64_t>(data[0] % 8u) + std::string(rest));
  }
  return 0;
}
