// The bytes of a link segment: what both processes map, and nothing else.
//
//   [control page 4096][pair lines kMaxPairs * 512][layer times][slot 0] ... [slot slots-1]
//   slot: [SlotHeader][x][ids][weights][deferred][results], each part on 128 bytes, the
//   slot on 4096
//
// A submission has a 64-bit sequence number, from 1, without gaps; slot = sequence mod slots, and
// the header repeats sequence and epoch, so a stale or half-written slot is recognised. Ringing is
// storing the sequence in the pair's `submit_seq`; the answer is complete when `done_seq` of any
// pair has reached it. A lane has at most one submission outstanding, and slots >= 2 * lanes: then
// no thread can still read a slot's results when another refills it.
//
// Plain data: every word that both sides touch at once is accessed through the atomic helpers
// below. Futex words are the low halves of 64-bit words (little endian). Nothing here allocates;
// all is safe on any input bytes.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "absl/status/statusor.h"
#include "common/shm/expert_batch.h"
#include "common/shm/thread_pairs.h"

namespace tandem::shm {

static_assert(std::endian::native == std::endian::little, "futex words are low halves");

inline constexpr uint64_t kSegmentMagic = 0x54444d5345473031;  // "TDMSEG01"
inline constexpr uint32_t kSegmentVersion = 2;
inline constexpr uint32_t kMaxLanes = 8;
inline constexpr uint32_t kMaxSlots = 16;
inline constexpr size_t kLineBytes = 128;  // two cache lines: the adjacent one is prefetched along
inline constexpr size_t kPageBytes = 4096;

// A word alone on its line. `word` is the low half: what futexes compare.
struct alignas(kLineBytes) Line {
  union {
    uint64_t value;
    uint32_t word;
  };
  uint8_t unused[kLineBytes - sizeof(uint64_t)];
};
static_assert(sizeof(Line) == kLineBytes);

// The last sequence completed, with the outcome of each slot's last submission beside it: whoever
// has seen the sequence has the outcome in the same cache line (on a GPU: in the same read over
// PCIe).
struct alignas(kLineBytes) DoneLine {
  union {
    uint64_t value;
    uint32_t word;
  };
  uint16_t replies[kMaxSlots];  // by slot: low byte of the sequence << 8 | RefuseCode
  uint8_t unused[kLineBytes - sizeof(uint64_t) - kMaxSlots * sizeof(uint16_t)];
};
static_assert(sizeof(DoneLine) == kLineBytes && offsetof(DoneLine, unused) <= 64);

constexpr uint16_t MakeReply(uint64_t sequence, uint32_t code) {
  return static_cast<uint16_t>((sequence & 0xFF) << 8 | (code & 0xFF));
}

struct PairLines {
  Line submit_seq;  // last sequence rung by the pair's gpu thread
  DoneLine done_seq;
  Line submit_sleepers;  // expert threads asleep on submit_seq
  Line done_sleepers;    // gpu threads asleep on done_seq
};
static_assert(sizeof(PairLines) == 4 * kLineBytes);

struct ControlPage {
  uint64_t magic;
  uint32_t version;
  uint32_t slots;
  uint64_t model_hash;
  uint64_t epoch;
  uint64_t segment_bytes;
  BatchLimits limits;
  uint8_t unused[kLineBytes - 5 * sizeof(uint64_t) - sizeof(BatchLimits)];
  Line step_active;   // 1 from BeginStep to EndStep: spinning is worth it, progress is required
  Line abort;         // nonzero: the link is given up, by either side
  Line expert_ticks;  // heartbeat: finished tasks
  Line gpu_ticks;     // heartbeat: submissions copied and results gathered, per thread
  Line expert_life;   // robust futex words (low half)
  Line gpu_life;
  uint8_t tail[kPageBytes - 7 * kLineBytes];
};
static_assert(sizeof(BatchLimits) == 28);
static_assert(offsetof(ControlPage, step_active) == kLineBytes);
static_assert(offsetof(ControlPage, gpu_life) == 6 * kLineBytes);
static_assert(sizeof(ControlPage) == kPageBytes);

struct alignas(kLineBytes) SlotHeader {
  uint64_t sequence;
  uint64_t epoch;
  uint64_t step;
  uint32_t lane;
  uint32_t layer;
  uint32_t rows;
  uint32_t top_k;
  uint32_t hidden;
  uint32_t row_type;
  uint32_t flags;
  uint32_t has_deferred;  // 0 or 1
  uint64_t x_bytes;
  uint64_t ids_bytes;
  uint64_t weights_bytes;
  uint64_t deferred_bytes;
  uint64_t result_bytes;
  uint64_t sequence_again;  // written last
};
static_assert(sizeof(SlotHeader) == kLineBytes && offsetof(SlotHeader, sequence_again) == 96);

// When the expert worker was at what with one layer of one lane, in its last step: CLOCK_MONOTONIC
// ns, which both processes share. Written by the expert worker, read between steps; `step` last.
struct TimesEntry {
  uint64_t begin_ns;  // taken up
  uint64_t reply_ns;  // answered
  uint64_t end_ns;    // its deferred picks done; reply_ns without any
  uint64_t step;
};
static_assert(sizeof(TimesEntry) == 32);

static_assert(std::is_trivially_copyable_v<ControlPage> && std::is_standard_layout_v<ControlPage>);
static_assert(std::is_trivially_copyable_v<SlotHeader> && std::is_standard_layout_v<SlotHeader>);

// Where everything lies. Offsets of a slot's parts are from the slot's start.
struct SegmentLayout {
  BatchLimits limits;
  uint32_t slots = 0;
  uint64_t pairs_offset = 0;
  uint64_t times_offset = 0;  // TimesEntry [lanes, num_layers]
  uint64_t slots_offset = 0;
  uint64_t slot_bytes = 0;
  uint64_t x_offset = 0;
  uint64_t ids_offset = 0;
  uint64_t weights_offset = 0;
  uint64_t deferred_offset = 0;
  uint64_t results_offset = 0;
  uint64_t segment_bytes = 0;
};

// INVALID_ARGUMENT for limits that are zero, above what the types hold, or whose sizes overflow.
absl::StatusOr<SegmentLayout> ComputeLayout(const BatchLimits& limits, uint32_t slots);

// Slots for that many lanes: two a lane.
constexpr uint32_t SlotsFor(uint32_t lanes) { return 2 * lanes; }

// A mapped segment with its layout: typed access to the parts. Copyable view, owns nothing.
class SegmentView {
 public:
  SegmentView() = default;
  SegmentView(uint8_t* base, const SegmentLayout& layout) : base_(base), layout_(layout) {}

  const SegmentLayout& layout() const { return layout_; }
  ControlPage* control() const { return reinterpret_cast<ControlPage*>(base_); }
  PairLines* pair(uint32_t index) const {
    return reinterpret_cast<PairLines*>(base_ + layout_.pairs_offset) + index;
  }
  // REQUIRES: lane and layer within the limits.
  TimesEntry* times(uint32_t lane, uint32_t layer) const {
    return reinterpret_cast<TimesEntry*>(base_ + layout_.times_offset) +
           size_t{lane} * layout_.limits.num_layers + layer;
  }
  uint64_t slot_index(uint64_t sequence) const { return sequence % layout_.slots; }
  uint8_t* slot(uint64_t sequence) const {
    return base_ + layout_.slots_offset + slot_index(sequence) * layout_.slot_bytes;
  }
  SlotHeader* header(uint64_t sequence) const {
    return reinterpret_cast<SlotHeader*>(slot(sequence));
  }
  uint8_t* x(uint64_t sequence) const { return slot(sequence) + layout_.x_offset; }
  uint16_t* ids(uint64_t sequence) const {
    return reinterpret_cast<uint16_t*>(slot(sequence) + layout_.ids_offset);
  }
  float* weights(uint64_t sequence) const {
    return reinterpret_cast<float*>(slot(sequence) + layout_.weights_offset);
  }
  uint8_t* deferred(uint64_t sequence) const { return slot(sequence) + layout_.deferred_offset; }
  float* results(uint64_t sequence) const {
    return reinterpret_cast<float*>(slot(sequence) + layout_.results_offset);
  }

 private:
  uint8_t* base_ = nullptr;
  SegmentLayout layout_;
};

// Atomic access to words of the segment.
inline uint64_t LoadAcquire(const uint64_t& word) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}
inline void StoreRelease(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);
}
inline uint16_t LoadReply(const DoneLine& line, uint64_t slot) {
  return std::atomic_ref<uint16_t>(const_cast<uint16_t&>(line.replies[slot]))
      .load(std::memory_order_relaxed);
}
inline void StoreReply(DoneLine& line, uint64_t slot, uint16_t reply) {
  std::atomic_ref<uint16_t>(line.replies[slot]).store(reply, std::memory_order_relaxed);
}
inline void AddRelaxed(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).fetch_add(value, std::memory_order_relaxed);
}

// Copies a shared POD word by word, each word read exactly once: what is checked is what is used.
template <typename T>
T CopyOnce(const T& shared) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  uint64_t words[sizeof(T) / sizeof(uint64_t)];
  auto* from = reinterpret_cast<uint64_t*>(const_cast<T*>(&shared));
  for (size_t i = 0; i < std::size(words); ++i) {
    words[i] = std::atomic_ref<uint64_t>(from[i]).load(std::memory_order_relaxed);
  }
  T copy;
  std::memcpy(&copy, words, sizeof(T));
  return copy;
}

// The opposite direction; words are stored in ascending order.
template <typename T>
void StoreWords(T* shared, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  uint64_t words[sizeof(T) / sizeof(uint64_t)];
  std::memcpy(words, &value, sizeof(T));
  auto* to = reinterpret_cast<uint64_t*>(shared);
  for (size_t i = 0; i < std::size(words); ++i) {
    std::atomic_ref<uint64_t>(to[i]).store(words[i], std::memory_order_relaxed);
  }
}

}  // namespace tandem::shm
