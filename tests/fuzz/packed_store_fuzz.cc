// Feeds the readers of packed experts a file that differs from an intact one. The first byte
// chooses: 0 takes the rest as the file's bytes; otherwise the rest is changes of 5 bytes, an
// offset and what to put there, and a last 1 to 4 bytes that cut the file. What is accepted must
// hold the intact file's weights.
//
// Run: packed_store_fuzz -runs=100000 -max_len=64

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "common/base/check.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/weight_store.h"

namespace {

using namespace tandem::expert;  // NOLINT: a fuzz target is one function

class Numbers final : public ExpertSource {
 public:
  MatrixFormat format(const ExpertMatrix&) const override {
    return {tandem::WeightFormat::kBf16, 0};
  }
  absl::Status ReadElements(const ExpertMatrix& matrix, tandem::Range rows, tandem::Range cols,
                            tandem::WeightFormat, void* out) const override {
    auto* to = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < rows.size() * cols.size(); ++i) {
      to[i] = static_cast<uint16_t>(0x3c00 + matrix.expert + i);
    }
    return absl::OkStatus();
  }
  absl::Status ReadCodes(const ExpertMatrix&, tandem::Range, tandem::Range, uint8_t*,
                         tandem::GroupParameters*) const override {
    return absl::InternalError("no codes");
  }
};

StoreSpec Spec() {
  StoreSpec spec;
  spec.model_hash = 7;
  spec.layers = 1;
  spec.moe_layers = {0};
  spec.formats = {LayerFormat{}};
  spec.experts = 2;
  spec.hidden = 8;
  spec.intermediate = 8;
  spec.quantum = 4;
  spec.segments = {0, 2};
  return spec;
}

tandem::shm::UniqueFd FileOf(const std::string& bytes) {
  tandem::shm::UniqueFd fd(memfd_create("fuzz", MFD_CLOEXEC));
  TANDEM_CHECK(write(fd.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  return fd;
}

const std::string& Intact() {
  static const std::string bytes = [] {
    const tandem::shm::UniqueFd fd(memfd_create("intact", MFD_CLOEXEC));
    LoadProgress progress;
    TANDEM_CHECK(WeightStore::Pack(fd.get(), Spec(), Numbers(), {.threads = 1}, &progress).ok());
    std::string all(static_cast<size_t>(lseek(fd.get(), 0, SEEK_END)), '\0');
    TANDEM_CHECK(pread(fd.get(), all.data(), all.size(), 0) == static_cast<ssize_t>(all.size()));
    TANDEM_CHECK(WeightStore::Attach(FileOf(all).get(), Spec()).ok());
    return all;
  }();
  return bytes;
}

std::string Changed(const uint8_t* data, size_t size) {
  std::string file = Intact();
  uint32_t at = 0;
  for (; size >= 5; data += 5, size -= 5) {
    std::memcpy(&at, data, sizeof(at));
    file[at % file.size()] = static_cast<char>(data[4]);
  }
  if (size == 0) return file;
  at = 0;
  std::memcpy(&at, data, size);
  file.resize(std::min<size_t>(at, file.size()));
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string file = data[0] == 0
                               ? std::string(reinterpret_cast<const char*>(data) + 1, size - 1)
                               : Changed(data + 1, size - 1);
  const tandem::shm::UniqueFd fd = FileOf(file);
  const absl::Status found = WeightStore::Check(fd.get(), Spec());
  TANDEM_CHECK(found.ok() || !found.message().empty());
  const auto part = WeightStore::AttachPart(fd.get(), Spec(), {1, 2});
  const auto store = WeightStore::Attach(fd.get(), Spec());
  if (!store.ok()) return 0;
  TANDEM_CHECK(found.ok() && part.ok());
  const uint64_t data_offset = (*store)->manifest().data_offset;
  TANDEM_CHECK(file.compare(data_offset, std::string::npos, Intact(), data_offset) == 0);
  return 0;
}
