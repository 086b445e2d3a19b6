#pragma once

// The packed routed experts of one worker, by (layer, expert, segment), read-only, in a memfd or
// file that outlives the process: the supervisor keeps the descriptor, so a restarted worker
// attaches in milliseconds instead of reading the checkpoint again.
//
// A file is used only if its manifest is complete, its checksum holds and it describes exactly the
// wanted store (model, format, layout, segments). A sealed file (F_SEAL_FUTURE_WRITE or
// F_SEAL_WRITE) cannot have been changed since; of an unsealed one every expert's checksum is
// verified.
//
// Thread safety: a WeightStore is immutable; any thread may read it. Ownership: the mapping belongs
// to the object; the descriptor stays the caller's. Views must not outlive the store.
// Errors: NOT_FOUND (nothing written yet), DATA_LOSS (torn or corrupt), FAILED_PRECONDITION
// (another model, range or layout), RESOURCE_EXHAUSTED (memory); each says what was found.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/hw/pages.h"
#include "expert_worker/engine/expert_source.h"
#include "expert_worker/engine/store_manifest.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::expert {

// Filled while a store is; read by any thread.
struct LoadProgress {
  std::atomic<uint64_t> loaded_bytes{0};  // of packed weights
  std::atomic<uint64_t> total_bytes{0};
  std::atomic<bool> cancel{false};  // set by the reader: loading ends with CANCELLED
};

struct LoadOptions {
  int threads = 1;
  // kOff: pages stay as the file has them.
  HugePages pages = HugePages::kAuto;
};

class WeightStore {
 public:
  // Maps a complete store.
  static absl::StatusOr<std::unique_ptr<WeightStore>> Attach(int fd, const StoreSpec& spec);
  // Maps a complete store of more segments than `owned`, and gives those. REQUIRES: they are within
  // `spec`'s.
  static absl::StatusOr<std::unique_ptr<WeightStore>> AttachPart(int fd, const StoreSpec& spec,
                                                                 SegmentRange owned);

  // Maps a complete store of another process for copies of some experts: it must be sealed, so that
  // nobody can change or cut it, and no page tables are filled ahead. FAILED_PRECONDITION if it is
  // not sealed.
  static absl::StatusOr<std::unique_ptr<WeightStore>> AttachSealed(int fd, const StoreSpec& spec);

  // Whether the file is a complete store that AttachPart maps, its data apart.
  static absl::Status Check(int fd, const StoreSpec& spec);

  // Writes a store into the file (whatever it held): `fill` its data and checksums. Marks it
  // complete and seals it where the file can be sealed. Shared memory gets huge pages first, if
  // `pages` lets it. FAILED_PRECONDITION if it is sealed already.
  using Filler = std::function<absl::Status(const StoreManifest& manifest, char* base)>;
  static absl::Status Fill(int fd, const StoreSpec& spec, HugePages pages, LoadProgress* progress,
                           const Filler& fill);
  // Fills it with `source`.
  static absl::Status Pack(int fd, const StoreSpec& spec, const ExpertSource& source,
                           const LoadOptions& options, LoadProgress* progress);
  // Pack, then Attach.
  static absl::StatusOr<std::unique_ptr<WeightStore>> Build(int fd, const StoreSpec& spec,
                                                            const ExpertSource& source,
                                                            const LoadOptions& options,
                                                            LoadProgress* progress);

  ~WeightStore();
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  const StoreManifest& manifest() const { return manifest_; }
  // Of the owned segments.
  uint64_t data_bytes() const { return data_bytes_; }
  PageKind page_kind() const { return page_kind_; }
  bool sealed() const { return sealed_; }

  bool has_layer(uint32_t layer) const {
    return layer < manifest_.layers && manifest_.layer[layer].slot != kNoSlot;
  }
  SegmentRange owned() const { return owned_; }
  // Segments owned, and the intermediate features they hold together.
  uint32_t segments() const { return owned_.size(); }
  uint32_t width() const { return width_; }
  // Features of the owned segment `s`, 0 <= s < segments().
  uint32_t segment_width(uint32_t s) const {
    return s + 1 == segments() ? width_ - s * manifest_.quantum : manifest_.quantum;
  }

  // REQUIRES of all: has_layer(layer), expert and segment in range, segments() > 0.
  const LayerFormat& format(uint32_t layer) const { return layout(layer).format; }
  // Bytes of a segment, without what follows its down chunk.
  uint64_t segment_bytes(uint32_t layer) const { return layout(layer).segment_bytes; }
  // Gate rows, then up rows of one owned segment: [2 * segment_width(s), hidden].
  kernels::PackedMatrix GateUp(uint32_t layer, uint32_t expert, uint32_t s) const;
  // Down over all owned segments: [hidden, width()].
  kernels::PackedMatrix Down(uint32_t layer, uint32_t expert) const;
  // Down of `count` owned segments from `s` on: [hidden, their widths together].
  kernels::PackedMatrix DownSegments(uint32_t layer, uint32_t expert, uint32_t s,
                                     uint32_t count) const;
  // [2 * segment_width(s)]: gate's, then up's. Null without biases.
  const float* GateUpBias(uint32_t layer, uint32_t expert, uint32_t s) const;
  // [hidden]. Null without biases, and where segment 0 is not owned.
  const float* DownBias(uint32_t layer, uint32_t expert) const;

 private:
  WeightStore(const StoreManifest& manifest, SegmentRange owned, const void* base,
              uint64_t mapped_bytes);
  const SlotLayout& layout(uint32_t layer) const { return layouts_[manifest_.layer[layer].slot]; }
  const char* Block(uint32_t layer, uint32_t expert) const;
  const char* Segment(uint32_t layer, uint32_t expert, uint32_t s) const;

  const StoreManifest manifest_;
  const std::vector<SlotLayout> layouts_;
  const SegmentRange owned_;
  const char* const base_;
  const uint64_t mapped_bytes_;
  uint64_t data_bytes_ = 0;
  uint32_t width_ = 0;
  PageKind page_kind_ = PageKind::kPlain;
  bool sealed_ = false;
};

}  // namespace tandem::expert
