// The memory of a link: a memfd made by the expert worker, sealed against resizing, mapped by both
// sides.
//
// Sealed (SHRINK, GROW, SEAL), so that no side can truncate it under the other (SIGBUS). All pages
// are allocated at creation: what does not fit is an error then, not a fault later. Huge pages
// (hugetlb, then transparent) when there are any. Nothing is left behind when both processes are
// gone. Movable owner; not thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "common/shm/layout.h"
#include "common/shm/unique_fd.h"

namespace tandem::shm {

class Segment {
 public:
  // Makes and maps a segment and fills its control page. RESOURCE_EXHAUSTED when memory is short.
  static absl::StatusOr<Segment> Create(const SegmentLayout& layout, uint64_t model_hash,
                                        uint64_t epoch);
  // Maps a received descriptor. DATA_LOSS when seals, size or control page are not what `layout`,
  // `model_hash` and `epoch` say; `segment_bytes` is the announced size.
  static absl::StatusOr<Segment> Map(const UniqueFd& fd, const SegmentLayout& layout,
                                     uint64_t segment_bytes, uint64_t model_hash, uint64_t epoch);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  const SegmentView& view() const { return view_; }
  uint64_t mapped_bytes() const { return mapped_bytes_; }
  // "hugetlb", "transparent" or "plain".
  const char* page_kind() const { return page_kind_; }
  // Of a created segment, until ReleaseFd: to be passed on.
  int fd() const { return fd_.get(); }
  void ReleaseFd() { fd_.Reset(); }

 private:
  Segment(UniqueFd fd, void* base, uint64_t bytes, const SegmentLayout& layout, const char* kind);

  UniqueFd fd_;
  void* base_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  SegmentView view_;
  const char* page_kind_ = "plain";
};

}  // namespace tandem::shm
