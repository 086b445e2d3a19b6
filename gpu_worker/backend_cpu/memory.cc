#include "gpu_worker/backend_cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem::gpu {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

}  // namespace

PageBuffer::~PageBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

PageBuffer::PageBuffer(PageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

PageBuffer& PageBuffer::operator=(PageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

absl::StatusOr<PageBuffer> PageBuffer::Create(size_t bytes) {
  PageBuffer buffer;
  buffer.bytes_ = std::max<size_t>(bytes, 1);
  void* data =
      mmap(nullptr, buffer.bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes for the CPU backend"));
  }
  buffer.data_ = data;
  // Refused where huge pages are off: small pages serve as well.
  if (bytes >= kHugePageBytes) madvise(data, buffer.bytes_, MADV_HUGEPAGE);
  return buffer;
}

}  // namespace tandem::gpu
