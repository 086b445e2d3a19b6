#include "common/shm/layout.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace tandem::shm {
namespace {

// A running offset that remembers overflow instead of wrapping.
class Cursor {
 public:
  // Reserves count * bytes, aligned, and returns its offset.
  uint64_t Take(uint64_t count, uint64_t bytes, uint64_t align) {
    const uint64_t start = Align(align);
    uint64_t size = 0;
    if (__builtin_mul_overflow(count, bytes, &size)) overflow_ = true;
    if (__builtin_add_overflow(start, size, &at_)) overflow_ = true;
    return start;
  }
  uint64_t Align(uint64_t align) {
    if (__builtin_add_overflow(at_, align - 1, &at_)) overflow_ = true;
    at_ &= ~(align - 1);
    return at_;
  }
  bool overflow() const { return overflow_; }

 private:
  uint64_t at_ = 0;
  bool overflow_ = false;
};

absl::Status CheckRange(const char* name, uint32_t value, uint32_t max) {
  if (value >= 1 && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("link: ", name, " is ", value, ", must be 1 to ", max));
}

}  // namespace

absl::StatusOr<SegmentLayout> ComputeLayout(const BatchLimits& limits, uint32_t slots) {
  // Far above any model, low enough that rows * hidden fits 32 bits times 8.
  constexpr uint32_t kMaxRows = 1u << 20;
  constexpr uint32_t kMaxHidden = 1u << 20;
  constexpr uint32_t kMaxTopK = 256;
  constexpr uint32_t kMaxLayers = 1u << 16;
  // A segment above this is a mistake or an attack, not a configuration.
  constexpr uint64_t kMaxSegmentBytes = 1ull << 40;
  for (const absl::Status& status :
       {CheckRange("max_rows", limits.max_rows, kMaxRows),
        CheckRange("hidden", limits.hidden, kMaxHidden),
        CheckRange("top_k", limits.top_k, kMaxTopK),
        CheckRange("num_experts", limits.num_experts, kNoExpert),
        CheckRange("num_layers", limits.num_layers, kMaxLayers),
        CheckRange("lanes", limits.lanes, kMaxLanes), CheckRange("slots", slots, kMaxSlots)}) {
    if (!status.ok()) return status;
  }
  if (limits.row_type != RowType::kBf16 && limits.row_type != RowType::kF32) {
    return absl::InvalidArgumentError("link: unknown row type");
  }
  if (slots < 2 * limits.lanes) {
    return absl::InvalidArgumentError(
        absl::StrCat("link: ", slots, " slots are too few for ", limits.lanes, " lanes"));
  }
  SegmentLayout layout;
  layout.limits = limits;
  layout.slots = slots;
  const uint64_t elements = uint64_t{limits.max_rows} * limits.hidden;
  const uint64_t picks = uint64_t{limits.max_rows} * limits.top_k;

  Cursor slot;
  slot.Take(1, sizeof(SlotHeader), kLineBytes);
  layout.x_offset = slot.Take(elements, RowTypeBytes(limits.row_type), kLineBytes);
  layout.ids_offset = slot.Take(picks, sizeof(uint16_t), kLineBytes);
  layout.weights_offset = slot.Take(picks, sizeof(float), kLineBytes);
  layout.deferred_offset = slot.Take(picks, sizeof(uint8_t), kLineBytes);
  layout.results_offset = slot.Take(elements, sizeof(float), kLineBytes);
  layout.slot_bytes = slot.Align(kPageBytes);

  Cursor segment;
  segment.Take(1, sizeof(ControlPage), kPageBytes);
  layout.pairs_offset = segment.Take(kMaxPairs, sizeof(PairLines), kPageBytes);
  layout.times_offset =
      segment.Take(uint64_t{limits.lanes} * limits.num_layers, sizeof(TimesEntry), kLineBytes);
  layout.slots_offset = segment.Take(slots, layout.slot_bytes, kPageBytes);
  layout.segment_bytes = segment.Align(kPageBytes);
  if (slot.overflow() || segment.overflow() || layout.segment_bytes > kMaxSegmentBytes) {
    return absl::InvalidArgumentError(absl::StrCat("link: ", limits.max_rows, " rows of ",
                                                   limits.hidden, " need too large a segment"));
  }
  return layout;
}

}  // namespace tandem::shm
