#pragma once

// What a weight store says about itself: a fixed-size POD page at the start of the file. Two stores
// are interchangeable exactly when their manifests are equal, so attaching is one comparison with
// the manifest that the worker would write itself.
//
// File: manifest | checksum of each (slot, expert), 8 bytes | padding | data. Data of a slot (a
// layer with routed experts, in order of layers), expert and segment of the owned range:
//   gate rows, then up rows of the segment as one packed matrix [2 * width, hidden]
//   down columns of the segment as one packed chunk [hidden, width]
// Every segment takes `segment_bytes`, the last narrower one too.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "expert_worker/engine/segments.h"
#include "expert_worker/kernels/kernel_table.h"

namespace tandem::expert {

inline constexpr uint64_t kStoreMagic = 0x45524F54534D4454;  // "TDMSTORE"
inline constexpr uint32_t kStoreVersion = 2;
inline constexpr uint32_t kStoreComplete = 0x4C4C4146;  // any other value: being written, or torn
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint16_t kNoSlot = 0xFFFF;

// The model and the part of it that a store holds.
struct StoreSpec {
  uint64_t model_hash = 0;
  WeightFormat format = WeightFormat::kBf16;
  uint32_t group_columns = 0;        // of quantized formats
  uint32_t layers = 0;               // of the model
  std::vector<uint32_t> moe_layers;  // those with routed experts, ascending
  uint32_t experts = 0;
  uint32_t hidden = 0;
  uint32_t intermediate = 0;
  uint32_t quantum = 4;
  SegmentRange segments;
};

struct StoreManifest {
  uint64_t magic;
  uint32_t version;
  uint32_t format;
  uint32_t layout_tag;
  uint32_t layers;
  uint64_t model_hash;
  uint32_t slots;
  uint32_t experts;
  uint32_t hidden;
  uint32_t intermediate;
  uint32_t quantum;
  uint32_t segment_begin;
  uint32_t segment_end;
  uint32_t group_columns;
  uint64_t segment_bytes;
  uint64_t down_offset;  // of the down chunk in a segment
  uint64_t data_offset;
  uint64_t file_bytes;
  uint16_t layer_slot[kMaxLayers];
  // Not part of the identity:
  uint64_t checksum;  // of all above and of the table of checksums
  uint32_t complete;  // kStoreComplete, written last
  uint32_t padding;
};
static_assert(sizeof(StoreManifest) == 2160);

// Errors: INVALID_ARGUMENT for dimensions that no store can have.
absl::StatusOr<StoreManifest> MakeManifest(const StoreSpec& spec);

// Empty when `found` identifies the same store as `wanted`, else what differs ("model_hash ...").
std::string ManifestDifference(const StoreManifest& wanted, const StoreManifest& found);

// 64 bits over `bytes` (a multiple of 8) at memory speed; detects torn and flipped data, not
// malice.
uint64_t StoreChecksum(const void* data, uint64_t bytes, uint64_t seed);

}  // namespace tandem::expert
