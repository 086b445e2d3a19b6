#pragma once

// What a weight store says about itself: a fixed-size POD at the start of the file. Two stores are
// interchangeable exactly when their manifests are equal, so attaching is one comparison with the
// manifest that the worker would write itself.
//
// File: manifest | checksums, 8 bytes each | padding | data. A store of all segments, on disk, is a
// packed file (packed_file.h); one of some segments, in memory, is what a worker computes from.
// Data of a slot (a layer with routed experts, in order of layers) and expert, a block:
//   head     [hidden] F32 of the down bias; only with biases, and only where segment 0 is held, so
//            that the sums of all workers contain it once
//   segment  of the held range, each:
//     gate rows, then up rows of the segment as one packed matrix [2 * quantum, hidden]
//     their biases, [2 * quantum] F32; only with biases
//     down columns of the segment as one packed chunk [hidden, quantum]
// Heads and segments are whole pages, so that a file can be read around the page cache, and every
// segment of a slot takes the same bytes, the last, narrower one too. Checksums are by slot, expert
// and segment; that of segment 0 covers the head.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "expert_worker/engine/segments.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::expert {

inline constexpr uint64_t kStoreMagic = 0x45524F54534D4454;  // "TDMSTORE"
inline constexpr uint32_t kStoreVersion = 3;
inline constexpr uint32_t kStoreComplete = 0x4C4C4146;  // any other value: being written, or torn
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint16_t kNoSlot = 0xFFFF;
inline constexpr uint64_t kStorePageBytes = 4096;

// The model and the part of it that a store holds.
struct StoreSpec {
  uint64_t model_hash = 0;
  uint32_t layers = 0;               // of the model
  std::vector<uint32_t> moe_layers;  // those with routed experts, ascending
  std::vector<LayerFormat> formats;  // of each of them, or one for all
  uint32_t experts = 0;
  uint32_t hidden = 0;
  uint32_t intermediate = 0;
  kernels::SwigluClamp activation;
  bool biases = false;
  uint32_t quantum = 4;
  SegmentRange segments;
};

struct LayerEntry {
  uint16_t slot;  // kNoSlot: a layer without routed experts
  uint8_t gate_up_format;
  uint8_t down_format;
  uint32_t gate_up_group_columns;
  uint32_t down_group_columns;
};

struct StoreManifest {
  uint64_t magic;
  uint32_t version;
  uint32_t layout_tag;
  uint64_t model_hash;
  uint32_t layers;
  uint32_t slots;
  uint32_t experts;
  uint32_t hidden;
  uint32_t intermediate;
  uint32_t quantum;
  uint32_t segment_begin;
  uint32_t segment_end;
  float activation_limit;
  float activation_alpha;
  float activation_up_offset;
  uint32_t biases;  // 0 or 1
  uint64_t data_offset;
  uint64_t file_bytes;
  LayerEntry layer[kMaxLayers];
  // Not part of the identity:
  uint64_t checksum;  // of all above and of the table of checksums
  uint32_t complete;  // kStoreComplete, written last
  uint32_t padding;

  uint32_t segments() const { return segment_end - segment_begin; }
  uint64_t checksums() const { return uint64_t{slots} * experts * segments(); }
  kernels::SwigluClamp activation() const {
    return {activation_limit, activation_alpha, activation_up_offset};
  }
};
static_assert(sizeof(LayerEntry) == 12);
static_assert(sizeof(StoreManifest) == 88 + 12 * kMaxLayers + 16);

// Where things lie in a slot; follows from the manifest.
struct SlotLayout {
  LayerFormat format;
  uint64_t offset;      // of expert 0's block in the file
  uint64_t head_bytes;  // of a block
  uint64_t segment_bytes;
  uint64_t bias_offset;  // in a segment
  uint64_t down_offset;  // in a segment
  uint64_t block_bytes;  // head and all held segments
  size_t gate_up_panel_bytes;
  size_t down_panel_bytes;
};

// Errors: INVALID_ARGUMENT for dimensions that no store can have.
absl::StatusOr<StoreManifest> MakeManifest(const StoreSpec& spec);

// One a slot. REQUIRES: a manifest of MakeManifest, or one equal to it.
std::vector<SlotLayout> LayoutsOf(const StoreManifest& manifest);

// Empty when `found` identifies the same store as `wanted`, else what differs ("model_hash ...").
std::string ManifestDifference(const StoreManifest& wanted, const StoreManifest& found);

// 64 bits over `bytes` (a multiple of 8) at memory speed; detects torn and flipped data, not
// malice.
uint64_t StoreChecksum(const void* data, uint64_t bytes, uint64_t seed);

// The seed of a segment's checksum, by absolute segment: blocks that changed places do not match.
constexpr uint64_t ChecksumSeed(uint32_t slot, uint32_t expert, uint32_t segment) {
  return uint64_t{slot} << 48 | uint64_t{expert} << 24 | segment;
}

}  // namespace tandem::expert
