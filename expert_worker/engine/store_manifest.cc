#include "expert_worker/engine/store_manifest.h"

#include <bit>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::expert {
namespace {

constexpr uint64_t kPageBytes = 4096;

constexpr uint64_t RoundUp(uint64_t value, uint64_t step) {
  return (value + step - 1) / step * step;
}

absl::Status CheckSpec(const StoreSpec& spec) {
  const uint32_t segments = spec.quantum == 0 ? 0 : SegmentCount(spec.intermediate, spec.quantum);
  if (spec.layers == 0 || spec.layers > kMaxLayers || spec.experts == 0 ||
      spec.experts >= kNoSlot || spec.hidden == 0 || spec.intermediate == 0 || segments == 0 ||
      spec.segments.begin > spec.segments.end || spec.segments.end > segments) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no weight store for ", spec.layers, " layers, ", spec.experts, " experts, hidden ",
        spec.hidden, ", intermediate ", spec.intermediate, ", segments [", spec.segments.begin,
        ", ", spec.segments.end, ") of ", segments));
  }
  uint32_t above = 0;
  for (uint32_t layer : spec.moe_layers) {
    if (layer < above || layer >= spec.layers) {
      return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " is out of order"));
    }
    above = layer + 1;
  }
  return absl::OkStatus();
}

std::string Differs(std::string_view field, uint64_t wanted, uint64_t found) {
  return absl::StrCat(std::string(field), " is ", found, " instead of ", wanted);
}

}  // namespace

absl::StatusOr<StoreManifest> MakeManifest(const StoreSpec& spec) {
  if (absl::Status status = CheckSpec(spec); !status.ok()) return status;
  StoreManifest m{};
  m.magic = kStoreMagic;
  m.version = kStoreVersion;
  m.format = static_cast<uint32_t>(spec.format);
  m.layout_tag = kernels::LayoutTag(spec.format);
  m.group_columns = spec.group_columns;
  m.layers = spec.layers;
  m.model_hash = spec.model_hash;
  m.slots = static_cast<uint32_t>(spec.moe_layers.size());
  m.experts = spec.experts;
  m.hidden = spec.hidden;
  m.intermediate = spec.intermediate;
  m.quantum = spec.quantum;
  m.segment_begin = spec.segments.begin;
  m.segment_end = spec.segments.end;
  m.down_offset = kernels::PanelBytes(spec.format, spec.hidden, spec.group_columns) *
                  kernels::PanelCount(2 * spec.quantum);
  m.segment_bytes =
      m.down_offset + kernels::PanelBytes(spec.format, spec.quantum, spec.group_columns) *
                          kernels::PanelCount(spec.hidden);
  const uint64_t blocks = uint64_t{m.slots} * m.experts;
  m.data_offset = RoundUp(sizeof(StoreManifest) + blocks * sizeof(uint64_t), kPageBytes);
  m.file_bytes = m.data_offset + blocks * spec.segments.size() * m.segment_bytes;
  for (uint16_t& slot : m.layer_slot) slot = kNoSlot;
  for (size_t i = 0; i < spec.moe_layers.size(); ++i) {
    m.layer_slot[spec.moe_layers[i]] = static_cast<uint16_t>(i);
  }
  return m;
}

std::string ManifestDifference(const StoreManifest& wanted, const StoreManifest& found) {
  if (wanted.version != found.version) return Differs("version", wanted.version, found.version);
  if (wanted.model_hash != found.model_hash) {
    return Differs("model_hash", wanted.model_hash, found.model_hash);
  }
  if (wanted.format != found.format) return Differs("format", wanted.format, found.format);
  if (wanted.layout_tag != found.layout_tag) {
    return Differs("layout_tag", wanted.layout_tag, found.layout_tag);
  }
  if (wanted.segment_begin != found.segment_begin) {
    return Differs("segment_begin", wanted.segment_begin, found.segment_begin);
  }
  if (wanted.segment_end != found.segment_end) {
    return Differs("segment_end", wanted.segment_end, found.segment_end);
  }
  if (std::memcmp(&wanted, &found, offsetof(StoreManifest, checksum)) != 0) {
    return "the model's shape differs";
  }
  return "";
}

// Four independent multiply-rotate chains over 32 bytes, folded at the end.
uint64_t StoreChecksum(const void* data, uint64_t bytes, uint64_t seed) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  const char* p = static_cast<const char*>(data);
  uint64_t lanes[4] = {seed, seed + kOdd, seed ^ kOdd, ~seed};
  const auto mix = [&](uint64_t& lane, uint64_t offset) {
    uint64_t word = 0;
    std::memcpy(&word, p + offset, sizeof(word));
    lane = std::rotl((lane ^ word) * kOdd, 29);
  };
  uint64_t offset = 0;
  for (; offset + 32 <= bytes; offset += 32) {
    for (uint64_t i = 0; i < 4; ++i) mix(lanes[i], offset + 8 * i);
  }
  for (; offset + 8 <= bytes; offset += 8) mix(lanes[0], offset);
  uint64_t sum = bytes;
  for (uint64_t lane : lanes) sum = std::rotl((sum ^ lane) * kOdd, 31);
  return sum ^ (sum >> 29);
}

}  // namespace tandem::expert
