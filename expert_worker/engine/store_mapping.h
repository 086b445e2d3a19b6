#pragma once

// A weight store's file in memory: mapped where huge pages can lie, and given them before it is
// filled. Reading weights through 4 KiB pages costs a fifth to a third of the memory's bandwidth.
//
// Thread safety: none needed; a mapping has one owner.

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/hw/pages.h"

namespace tandem::expert {

class StoreMapping {
 public:
  // `bytes` of a file from its beginning, shared, at a multiple of kHugePageBytes.
  // Errors: RESOURCE_EXHAUSTED.
  static absl::StatusOr<StoreMapping> Map(int fd, uint64_t bytes, int protection);
  StoreMapping(StoreMapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  StoreMapping& operator=(StoreMapping&&) = delete;
  ~StoreMapping();

  char* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  // The caller unmaps from now on.
  char* Release() { return std::exchange(base_, nullptr); }

  // Of a writable mapping of a file that nothing was written to: huge pages for shared memory that
  // has none by itself. Where the kernel's setting gives them on demand, it is asked to; else
  // (the usual setting is "never") they are made at once on all cores, which Linux 6.1 and later do
  // whatever the setting is. Zeroing them is then done; writing costs no more faults. What cannot
  // be had stays plain.
  void MakeHugePages(int fd) const;

  // Fills the page tables for reading on all cores, so that the first tokens need not: a fault a
  // 4 KiB page costs 67 ms a GiB on one core. Kernels before 5.14 refuse; then faults come later.
  void Populate() const;

 private:
  StoreMapping(char* base, uint64_t bytes) : base_(base), bytes_(bytes) {}
  char* base_;
  uint64_t bytes_;
};

}  // namespace tandem::expert
