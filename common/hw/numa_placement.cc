#include "common/hw/numa_placement.h"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/hw/pages.h"
#include "common/hw/topology.h"

namespace tandem {
namespace {

struct BitmaskDeleter {
  void operator()(bitmask* mask) const { numa_bitmask_free(mask); }
};
using NodeMask = std::unique_ptr<bitmask, BitmaskDeleter>;

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// A read-only shared mapping of a file, undone at the end.
class FileView {
 public:
  static absl::StatusOr<FileView> Map(int fd, size_t bytes) {
    const size_t unit = IsHugeTlb(fd) ? kHugePageBytes : PageBytes();
    const size_t rounded = (bytes + unit - 1) / unit * unit;
    void* base = mmap(nullptr, rounded, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot map ", rounded, " bytes: ", std::strerror(errno)));
    }
    return FileView(static_cast<char*>(base), rounded);
  }
  FileView(FileView&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  FileView& operator=(FileView&&) = delete;
  ~FileView() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  FileView(char* base, size_t bytes) : base_(base), bytes_(bytes) {}
  char* base_;
  size_t bytes_;
};

absl::Status Refused(const char* call, int error) {
  return absl::PermissionDeniedError(absl::StrCat(call, " is refused: ", std::strerror(error)));
}

}  // namespace

std::vector<int> KernelNumaPolicy::AllowedNodes() const {
  std::vector<int> nodes;
  if (numa_available() < 0) return nodes;
  const NodeMask mask(numa_get_mems_allowed());
  for (int node = 0; mask != nullptr && node <= numa_max_node(); ++node) {
    if (numa_bitmask_isbitset(mask.get(), static_cast<unsigned>(node)) != 0) nodes.push_back(node);
  }
  return nodes;
}

int KernelNumaPolicy::Prefer(void* base, size_t bytes, int node) const {
  const NodeMask mask(numa_allocate_nodemask());
  numa_bitmask_setbit(mask.get(), static_cast<unsigned>(node));
  return mbind(base, bytes, MPOL_PREFERRED, mask->maskp, mask->size + 1, 0) == 0 ? 0 : errno;
}

int KernelNumaPolicy::NodesOf(std::span<void* const> pages, std::span<int> nodes) const {
  return move_pages(0, pages.size(), const_cast<void**>(pages.data()), nullptr, nodes.data(), 0) < 0
             ? errno
             : 0;
}

absl::Status PreferNode(int fd, size_t bytes, int node, const NumaPolicy& policy) {
  const std::vector<int> allowed = policy.AllowedNodes();
  if (std::find(allowed.begin(), allowed.end(), node) == allowed.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("node ", node, " is none of the allowed ones (", FormatCpuList(allowed), ")"));
  }
  if (allowed.size() == 1 || bytes == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const FileView view, FileView::Map(fd, bytes));
  const int error = policy.Prefer(view.base(), view.bytes(), node);
  return error == 0 ? absl::OkStatus() : Refused("mbind", error);
}

absl::StatusOr<PlacementSample> SamplePlacement(int fd, size_t max_pages, int node,
                                                const NumaPolicy& policy) {
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("fstat: ", std::strerror(errno)));
  }
  const size_t file_pages = static_cast<size_t>(info.st_size) / PageBytes();
  const size_t count = std::min(max_pages, file_pages);
  PlacementSample sample;
  if (count == 0) return sample;
  ASSIGN_OR_RETURN(const FileView view, FileView::Map(fd, file_pages * PageBytes()));
  std::vector<void*> pages(count);
  for (size_t i = 0; i < count; ++i) {
    char* const page = view.base() + file_pages * i / count * PageBytes();
    // Only pages of this mapping have a node to tell.
    static_cast<void>(*static_cast<const volatile char*>(page));
    pages[i] = page;
  }
  std::vector<int> nodes(count, -ENOENT);
  const int error = policy.NodesOf(pages, nodes);
  if (error != 0) return Refused("move_pages", error);
  for (const int found : nodes) {
    if (found < 0) continue;
    ++sample.pages;
    if (found != node) ++sample.misplaced;
  }
  return sample;
}

}  // namespace tandem
