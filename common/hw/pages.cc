#include "common/hw/pages.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace tandem {
namespace {

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t ReadNumber(const char* path) {
  std::ifstream in(path);
  size_t value = 0;
  in >> value;
  return value;
}

// The chosen word of one of the kernel's settings, brackets included; empty if it has none.
std::string TransparentSetting(const char* name) {
  std::ifstream in(absl::StrCat("/sys/kernel/mm/transparent_hugepage/", name));
  std::string line;
  std::getline(in, line);
  const size_t begin = line.find('[');
  const size_t end = line.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  return line.substr(begin, end - begin + 1);
}

bool TransparentAvailable() {
  const std::string setting = TransparentSetting("enabled");
  return !setting.empty() && setting != "[never]";
}

}  // namespace

std::string_view PageKindName(PageKind kind) {
  switch (kind) {
    case PageKind::kPlain:
      return "plain";
    case PageKind::kTransparent:
      return "transparent";
    case PageKind::kHugeTlb:
      return "hugetlb";
  }
  return "unknown";
}

absl::StatusOr<HugePages> ParseHugePages(std::string_view text) {
  if (text == "auto") return HugePages::kAuto;
  if (text == "require") return HugePages::kRequire;
  if (text == "off") return HugePages::kOff;
  return absl::InvalidArgumentError(
      absl::StrCat("bad huge page option \"", std::string(text), "\": use auto, require or off"));
}

size_t FreeHugePages() {
  const char* base = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const size_t free_pages = ReadNumber(absl::StrCat(base, "free_hugepages").c_str());
  const size_t reserved = ReadNumber(absl::StrCat(base, "resv_hugepages").c_str());
  return free_pages > reserved ? free_pages - reserved : 0;
}

bool IsHugeTlb(int fd) {
  struct statfs fs {};
  return fstatfs(fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC;
}

bool IsSharedMemory(int fd) {
  struct statfs fs {};
  return fstatfs(fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
}

bool SharedTransparentAllowed() {
  const std::string setting = TransparentSetting("shmem_enabled");
  return !setting.empty() && setting != "[never]" && setting != "[deny]";
}

void CollapsePages(void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = (address + bytes) / kHugePageBytes * kHugePageBytes;
  for (uintptr_t at = RoundUp(address, kHugePageBytes); at < end; at += kHugePageBytes) {
    // Only a page that exists can become part of a larger one.
    auto* page = reinterpret_cast<char*>(at);
    *static_cast<volatile char*>(page) = 0;
    if (madvise(page, kHugePageBytes, MADV_COLLAPSE) != 0 && errno == EINVAL) return;
  }
}

// Of the lines of /proc/self/smaps: a mapping's begins with "ADDRESS-END ", lines "Name: N kB"
// follow.
PageKind MappedPageKind(const void* data) {
  std::ifstream in("/proc/self/smaps");
  std::ostringstream address;
  address << std::hex << std::setw(8) << std::setfill('0') << reinterpret_cast<uintptr_t>(data)
          << '-';
  const std::string begin = address.str();
  std::string line;
  bool here = false;
  size_t resident_kb = 0;
  size_t huge_kb = 0;
  while (std::getline(in, line)) {
    if (!here) {
      here = line.compare(0, begin.size(), begin) == 0;
      continue;
    }
    std::istringstream words(line);
    std::string name;
    size_t kb = 0;
    if (!(words >> name >> kb)) continue;
    if (name == "Rss:") resident_kb = kb;
    if (name == "AnonHugePages:" || name == "ShmemPmdMapped:" || name == "FilePmdMapped:") {
      huge_kb += kb;
    }
    if (name == "VmFlags:") break;
  }
  return huge_kb > 0 && huge_kb >= resident_kb / 2 ? PageKind::kTransparent : PageKind::kPlain;
}

std::string HugePageAdvice(size_t bytes) {
  const size_t needed = HugePagesFor(bytes);
  const size_t configured = ReadNumber("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
  const size_t free_pages = FreeHugePages();
  const size_t missing = needed > free_pages ? needed - free_pages : 0;
  return absl::StrCat("needs ", needed, " huge pages of 2 MiB, ", free_pages,
                      " are free: sysctl vm.nr_hugepages=", configured + missing);
}

absl::StatusOr<PageBuffer> PageBuffer::Allocate(size_t bytes, HugePages policy) {
  PageBuffer buffer;
  buffer.bytes_ = RoundUp(bytes == 0 ? 1 : bytes, kHugePageBytes);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (policy != HugePages::kOff && FreeHugePages() >= HugePagesFor(buffer.bytes_)) {
    void* data = mmap(nullptr, buffer.bytes_, PROT_READ | PROT_WRITE, flags | MAP_HUGETLB, -1, 0);
    if (data != MAP_FAILED) {
      buffer.data_ = data;
      buffer.kind_ = PageKind::kHugeTlb;
      return buffer;
    }
  }
  if (policy == HugePages::kRequire) {
    return absl::ResourceExhaustedError(HugePageAdvice(buffer.bytes_));
  }
  void* data = mmap(nullptr, buffer.bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", buffer.bytes_, " bytes: ", std::strerror(errno)));
  }
  buffer.data_ = data;
  if (policy == HugePages::kAuto && TransparentAvailable() &&
      madvise(data, buffer.bytes_, MADV_HUGEPAGE) == 0) {
    buffer.kind_ = PageKind::kTransparent;
  }
  return buffer;
}

PageBuffer::~PageBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

PageBuffer::PageBuffer(PageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      kind_(other.kind_) {}

PageBuffer& PageBuffer::operator=(PageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(kind_, other.kind_);
  return *this;
}

absl::StatusOr<Memfd> CreateMemfd(const std::string& name, size_t bytes, HugePages policy) {
  Memfd memfd;
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (policy != HugePages::kOff && bytes > 0 && FreeHugePages() >= HugePagesFor(bytes)) {
    memfd.fd = memfd_create(name.c_str(), flags | MFD_HUGETLB);
    const off_t size = static_cast<off_t>(RoundUp(bytes, kHugePageBytes));
    if (memfd.fd >= 0 && ftruncate(memfd.fd, size) == 0) {
      memfd.kind = PageKind::kHugeTlb;
      return memfd;
    }
    if (memfd.fd >= 0) close(memfd.fd);
  }
  if (policy == HugePages::kRequire) return absl::ResourceExhaustedError(HugePageAdvice(bytes));
  memfd.fd = memfd_create(name.c_str(), flags);
  if (memfd.fd < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot create memfd ", name, ": ", std::strerror(errno)));
  }
  if (bytes > 0 && ftruncate(memfd.fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(memfd.fd);
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot size memfd ", name, " to ", bytes, " bytes: ", std::strerror(error)));
  }
  return memfd;
}

}  // namespace tandem
