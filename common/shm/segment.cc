#include "common/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/hw/pages.h"

namespace tandem::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status Failed(const char* what) {
  return absl::ResourceExhaustedError(
      absl::StrCat("link segment: ", what, ": ", std::strerror(errno)));
}

uint64_t RoundUp(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Mapping {
  UniqueFd fd;
  void* base = nullptr;
  uint64_t bytes = 0;
  const char* kind = "plain";
};

void* MapShared(int fd, uint64_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

// Only worth a try when the pages would not be mostly padding; fails where none are reserved.
bool TryHugetlb(uint64_t bytes, Mapping* out) {
  if (bytes < 4 * kHugePageBytes) return false;
  const uint64_t rounded = RoundUp(bytes, kHugePageBytes);
  UniqueFd fd(memfd_create("tandem-link", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
  struct stat info;
  if (!fd.valid() || fstat(fd.get(), &info) != 0 ||
      static_cast<uint64_t>(info.st_blksize) != kHugePageBytes ||
      ftruncate(fd.get(), static_cast<off_t>(rounded)) != 0 ||
      fallocate(fd.get(), 0, 0, static_cast<off_t>(rounded)) != 0) {
    return false;
  }
  void* base = MapShared(fd.get(), rounded);
  if (base == MAP_FAILED) return false;
  *out = {std::move(fd), base, rounded, "hugetlb"};
  return true;
}

absl::Status MapSmallPages(uint64_t bytes, Mapping* out) {
  UniqueFd fd(memfd_create("tandem-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Failed("memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return Failed("ftruncate");
  void* base = MapShared(fd.get(), bytes);
  if (base == MAP_FAILED) return Failed("mmap");
  const bool huge = madvise(base, bytes, MADV_HUGEPAGE) == 0 && SharedTransparentAllowed();
  // Populating reports a shortage instead of raising SIGBUS; kernels before 5.14 refuse it.
  if (madvise(base, bytes, MADV_POPULATE_WRITE) != 0 &&
      (errno != EINVAL || fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0)) {
    const absl::Status status = Failed("allocating pages");
    munmap(base, bytes);
    return status;
  }
  *out = {std::move(fd), base, bytes, huge ? "transparent" : "plain"};
  return absl::OkStatus();
}

absl::Status Mismatch(const char* what) {
  return absl::DataLossError(absl::StrCat("link segment: ", what));
}

bool SameLimits(const BatchLimits& a, const BatchLimits& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

}  // namespace

Segment::Segment(UniqueFd fd, void* base, uint64_t bytes, const SegmentLayout& layout,
                 const char* kind)
    : fd_(std::move(fd)),
      base_(base),
      mapped_bytes_(bytes),
      view_(static_cast<uint8_t*>(base), layout),
      page_kind_(kind) {}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      base_(std::exchange(other.base_, nullptr)),
      mapped_bytes_(other.mapped_bytes_),
      view_(other.view_),
      page_kind_(other.page_kind_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    this->~Segment();
    new (this) Segment(std::move(other));
  }
  return *this;
}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, mapped_bytes_);
}

absl::StatusOr<Segment> Segment::Create(const SegmentLayout& layout, uint64_t model_hash,
                                        uint64_t epoch) {
  Mapping mapping;
  if (!TryHugetlb(layout.segment_bytes, &mapping)) {
    RETURN_IF_ERROR(MapSmallPages(layout.segment_bytes, &mapping));
  }
  Segment segment(std::move(mapping.fd), mapping.base, mapping.bytes, layout, mapping.kind);
  if (fcntl(segment.fd(), F_ADD_SEALS, kSeals) != 0) return Failed("sealing");
  ControlPage* page = segment.view().control();
  page->magic = kSegmentMagic;
  page->version = kSegmentVersion;
  page->slots = layout.slots;
  page->model_hash = model_hash;
  page->epoch = epoch;
  page->segment_bytes = mapping.bytes;
  page->limits = layout.limits;
  return segment;
}

absl::StatusOr<Segment> Segment::Map(const UniqueFd& fd, const SegmentLayout& layout,
                                     uint64_t segment_bytes, uint64_t model_hash, uint64_t epoch) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return Mismatch("the descriptor is not sealed");
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return Failed("fstat");
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size != segment_bytes || size < layout.segment_bytes ||
      size > RoundUp(layout.segment_bytes, kHugePageBytes)) {
    return Mismatch("its size is not the announced one");
  }
  void* base = MapShared(fd.get(), size);
  if (base == MAP_FAILED) return Failed("mmap");
  Segment segment(UniqueFd(), base, size, layout, "plain");
  ControlPage page;
  std::memcpy(static_cast<void*>(&page), base, sizeof(page));
  if (page.magic != kSegmentMagic || page.version != kSegmentVersion) {
    return Mismatch("its control page has another magic or version");
  }
  if (page.epoch != epoch || page.model_hash != model_hash || page.segment_bytes != size ||
      page.slots != layout.slots || !SameLimits(page.limits, layout.limits)) {
    return Mismatch("its control page is not that of the announced link");
  }
  return segment;
}

}  // namespace tandem::shm
