#include "expert_worker/engine/store_mapping.h"

#include <oneapi/tbb/parallel_for.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace tandem::expert {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{64} << 20;

// Calls run(first byte, bytes) for pieces of a mapping, on all cores.
template <typename Run>
void ForEachPiece(char* base, uint64_t bytes, Run run) {
  oneapi::tbb::parallel_for(uint64_t{0}, (bytes + kPieceBytes - 1) / kPieceBytes, [&](uint64_t i) {
    const uint64_t begin = i * kPieceBytes;
    run(base + begin, std::min(kPieceBytes, bytes - begin));
  });
}

}  // namespace

absl::StatusOr<StoreMapping> StoreMapping::Map(int fd, uint64_t bytes, int protection) {
  // An aligned place is cut from a larger reservation.
  const uint64_t reserved = bytes + kHugePageBytes;
  void* const hole = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (hole != MAP_FAILED) {
    const auto address = reinterpret_cast<uintptr_t>(hole);
    const uintptr_t aligned = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    munmap(hole, reserved);
    // Without MAP_FIXED: should another thread map something there first, any place will do.
    void* const base = mmap(reinterpret_cast<void*>(aligned), bytes, protection, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) return StoreMapping(static_cast<char*>(base), bytes);
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot map ", bytes, " bytes of the weight store: ", std::strerror(errno)));
}

StoreMapping::~StoreMapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

void StoreMapping::MakeHugePages(int fd) const {
  if (!IsSharedMemory(fd)) return;
  if (SharedTransparentAllowed()) {
    madvise(base_, bytes_, MADV_HUGEPAGE);
    return;
  }
  ForEachPiece(base_, bytes_, [](char* piece, uint64_t bytes) { CollapsePages(piece, bytes); });
}

void StoreMapping::Populate() const {
  ForEachPiece(base_, bytes_,
               [](char* piece, uint64_t bytes) { madvise(piece, bytes, MADV_POPULATE_READ); });
}

}  // namespace tandem::expert
