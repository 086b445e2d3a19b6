#include "common/checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem {

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  const auto os_error = [&path](const char* what) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, ": ", what));
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return os_error("open");
  struct stat info = {};
  void* mapping = MAP_FAILED;
  const bool stat_ok = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (stat_ok && info.st_size > 0) {
    mapping = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  }
  const int saved_errno = errno;
  ::close(fd);
  errno = saved_errno;
  if (!stat_ok) return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  if (info.st_size > 0 && mapping == MAP_FAILED) return os_error("mmap");

  MappedFile file;
  file.path_ = path;
  file.bytes_ = static_cast<uint64_t>(info.st_size);
  file.mtime_ns_ = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
  if (info.st_size > 0) file.data_ = static_cast<const uint8_t*>(mapping);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mtime_ns_, other.mtime_ns_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), bytes_);
}

}  // namespace tandem
