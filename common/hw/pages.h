#pragma once

// Memory for weights and link segments: explicit huge pages where there are any, else transparent
// ones, else plain pages; the result says which it got.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

enum class PageKind : uint8_t { kPlain, kTransparent, kHugeTlb };

std::string_view PageKindName(PageKind kind);

// What to try: kAuto takes the best there is; kRequire refuses anything but explicit huge pages,
// with the number that is missing and the command that provides it; kOff takes plain pages.
enum class HugePages : uint8_t { kAuto, kRequire, kOff };

// "auto", "require" or "off". Errors: INVALID_ARGUMENT.
absl::StatusOr<HugePages> ParseHugePages(std::string_view text);

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// The 2 MiB pages that `bytes` take, and the free ones of the pool.
constexpr size_t HugePagesFor(size_t bytes) {
  return bytes / kHugePageBytes + (bytes % kHugePageBytes != 0 ? 1 : 0);
}
size_t FreeHugePages();

// Whether a descriptor's file is made of explicit huge pages.
bool IsHugeTlb(int fd);

// Whether a descriptor's file is shared memory of the kernel's own: a memfd, or of tmpfs.
bool IsSharedMemory(int fd);

// Whether files of shared memory (memfds, shm) get transparent huge pages where madvise asks.
bool SharedTransparentAllowed();

// Makes transparent huge pages of a writable mapping of shared memory that nothing was written to,
// where whole ones lie within [data, data + bytes), whatever the kernel's setting is: zeroed, as
// fresh pages are. Addresses and places in the file must agree modulo kHugePageBytes. Needs
// Linux 6.1; what the kernel refuses stays as it is.
void CollapsePages(void* data, size_t bytes);

// How the mapping that begins at `data` is held now, as the page tables have it: explicit huge
// pages are not looked for. Costs a walk of the mapping's page table.
PageKind MappedPageKind(const void* data);

// "needs N huge pages of 2 MiB, M are free: sysctl vm.nr_hugepages=..." for logs and refusals.
std::string HugePageAdvice(size_t bytes);

// Anonymous memory, zeroed, unmapped on destruction. Movable.
class PageBuffer {
 public:
  // Errors: RESOURCE_EXHAUSTED with the advice above or the size that was refused.
  static absl::StatusOr<PageBuffer> Allocate(size_t bytes, HugePages policy);
  PageBuffer() = default;
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&& other) noexcept;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  PageKind kind() const { return kind_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;  // of the mapping
  PageKind kind_ = PageKind::kPlain;
};

// A sealable memfd. `bytes` may be 0: the file is sized later with ftruncate (hugetlb needs
// multiples of kHugePageBytes). With explicit huge pages the pages are reserved at creation.
struct Memfd {
  int fd = -1;
  PageKind kind = PageKind::kPlain;
};
absl::StatusOr<Memfd> CreateMemfd(const std::string& name, size_t bytes, HugePages policy);

}  // namespace tandem
