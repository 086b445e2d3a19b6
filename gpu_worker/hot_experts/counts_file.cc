#include "gpu_worker/hot_experts/counts_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status.h"
#include "common/shm/unique_fd.h"

namespace tandem::gpu {
namespace {

constexpr uint64_t kMagic = 0x53544E554F434454;  // "TDCOUNTS"
constexpr uint32_t kVersion = 1;

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t layers;
  uint64_t model_hash;
  uint64_t steps;
  uint32_t experts;
  uint32_t reserved;
  uint64_t checksum;  // of the counts and all above
};
static_assert(sizeof(Header) == 48);

// FNV-1a: tells torn and flipped bytes, not malice.
uint64_t Checksum(const Header& header, const std::vector<float>& counts) {
  uint64_t sum = 0xCBF29CE484222325;
  const auto add = [&sum](const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      sum = (sum ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001B3;
    }
  };
  add(&header, offsetof(Header, checksum));
  add(counts.data(), counts.size() * sizeof(float));
  return sum;
}

Header HeaderOf(const ExpertCounts& counts, uint64_t model_hash) {
  return {.magic = kMagic,
          .version = kVersion,
          .layers = static_cast<uint32_t>(counts.layers()),
          .model_hash = model_hash,
          .steps = counts.steps(),
          .experts = static_cast<uint32_t>(counts.experts()),
          .reserved = 0,
          .checksum = 0};
}

absl::Status Refused(const std::string& path, const char* what) {
  return absl::FailedPreconditionError(absl::StrCat(path, ": ", what, ": ", std::strerror(errno)));
}

absl::Status WriteAll(int fd, const void* data, size_t bytes, const std::string& path) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(fd, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return Refused(path, "write");
    at += written;
    bytes -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

// False where the file ends before.
bool ReadAll(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = read(fd, at, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

bool AreCounts(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](float x) { return std::isfinite(x) && x >= 0; });
}

absl::Status CheckHeader(const Header& found, const Header& wanted, const std::string& path) {
  if (found.magic != kMagic) {
    return absl::DataLossError(absl::StrCat(path, ": not a file of expert counts"));
  }
  if (found.version != kVersion || found.model_hash != wanted.model_hash ||
      found.layers != wanted.layers || found.experts != wanted.experts) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": counts of another model or release"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string CountsPath(const std::string& state_dir, uint64_t model_hash) {
  return absl::StrFormat("%s/hot-experts/%016x.counts", state_dir, model_hash);
}

absl::Status SaveCounts(const std::string& path, uint64_t model_hash, const ExpertCounts& counts) {
  std::vector<float> values;
  for (const float value : counts.values()) values.push_back(value / counts.unit());
  Header header = HeaderOf(counts, model_hash);
  header.checksum = Checksum(header, values);
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  const std::string part = path + ".part";
  const shm::UniqueFd fd(open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!fd.valid()) return Refused(part, "open");
  RETURN_IF_ERROR(WriteAll(fd.get(), &header, sizeof(header), part));
  RETURN_IF_ERROR(WriteAll(fd.get(), values.data(), values.size() * sizeof(float), part));
  if (fsync(fd.get()) != 0) return Refused(part, "fsync");
  if (rename(part.c_str(), path.c_str()) != 0) return Refused(path, "rename");
  return absl::OkStatus();
}

absl::Status LoadCounts(const std::string& path, uint64_t model_hash, ExpertCounts* counts) {
  const shm::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) {
    return errno == ENOENT ? absl::NotFoundError(absl::StrCat(path, ": no such file"))
                           : Refused(path, "open");
  }
  const Header wanted = HeaderOf(*counts, model_hash);
  Header found;
  if (!ReadAll(fd.get(), &found, sizeof(found))) {
    return absl::DataLossError(absl::StrCat(path, ": shorter than its header"));
  }
  RETURN_IF_ERROR(CheckHeader(found, wanted, path));
  std::vector<float> values(counts->values().size());
  char beyond;
  if (!ReadAll(fd.get(), values.data(), values.size() * sizeof(float)) ||
      ReadAll(fd.get(), &beyond, 1)) {
    return absl::DataLossError(absl::StrCat(path, ": not as long as its counts"));
  }
  if (Checksum(found, values) != found.checksum || !AreCounts(values)) {
    return absl::DataLossError(absl::StrCat(path, ": does not match its checksum"));
  }
  counts->Restore(values, found.steps);
  return absl::OkStatus();
}

}  // namespace tandem::gpu
