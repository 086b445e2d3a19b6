#include "common/quantize/safetensors_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/check.h"
#include "common/base/status.h"

namespace tandem {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr size_t kDataAlignment = 8;

// Names come from files that were read as JSON: quotes, backslashes and control characters.
std::string JsonQuoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&quoted, "\\u", absl::Hex(static_cast<int>(c), absl::kZeroPad4));
    } else {
      quoted.push_back(c);
    }
  }
  return quoted + "\"";
}

}  // namespace

uint64_t TensorToWrite::Bytes() const {
  uint64_t bytes = DTypeBytes(dtype);
  for (const int64_t dim : shape) bytes *= static_cast<uint64_t>(dim);
  return bytes;
}

std::string SafetensorsHeader(const std::vector<TensorToWrite>& tensors) {
  std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
  uint64_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    const uint64_t end = offset + tensor.Bytes();
    absl::StrAppend(&json, ",", JsonQuoted(tensor.name), ":{\"dtype\":\"",
                    std::string(DTypeName(tensor.dtype)), "\",\"shape\":[",
                    absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", offset, ",", end,
                    "]}");
    offset = end;
  }
  json += "}";
  json.append((kDataAlignment - json.size() % kDataAlignment) % kDataAlignment, ' ');
  std::string header;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    header.push_back(static_cast<char>(static_cast<uint64_t>(json.size()) >> (8 * i)));
  }
  return header + json;
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, std::vector<TensorToWrite> tensors) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  auto writer = std::unique_ptr<SafetensorsWriter>(new SafetensorsWriter(path, fd));
  if (fd < 0) return writer->Error("cannot be made");
  const std::string header = SafetensorsHeader(tensors);
  uint64_t offset = header.size();
  for (const TensorToWrite& tensor : tensors) {
    writer->begins_.push_back(offset);
    offset += tensor.Bytes();
  }
  writer->begins_.push_back(offset);
  // File systems that cannot reserve say so; there a full disk shows while writing.
  const int reserved = posix_fallocate(fd, 0, static_cast<off_t>(offset));
  if (reserved != 0 && reserved != EOPNOTSUPP && reserved != EINVAL) {
    errno = reserved;
    return writer->Error(absl::StrCat("cannot hold ", offset, " bytes"));
  }
  RETURN_IF_ERROR(writer->WriteAt(0, header));
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SafetensorsWriter::Error(std::string_view what) const {
  const int error = errno;
  return absl::ErrnoToStatus(
      error, absl::StrCat(path_, ": ", std::string(what), ": ", std::string(strerror(error))));
}

absl::Status SafetensorsWriter::Write(size_t index, uint64_t offset, std::string_view bytes) {
  TANDEM_CHECK(index + 1 < begins_.size() &&
               begins_[index] + offset + bytes.size() <= begins_[index + 1]);
  return WriteAt(begins_[index] + offset, bytes);
}

absl::Status SafetensorsWriter::WriteAt(uint64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return Error("cannot be written");
    bytes.remove_prefix(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (fsync(fd_) != 0) return Error("cannot be flushed");
  const int fd = std::exchange(fd_, -1);
  if (close(fd) != 0) return Error("cannot be closed");
  return absl::OkStatus();
}

}  // namespace tandem
