#include "expert_worker/engine/store_manifest.h"

#include <bit>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::expert {
namespace {

constexpr uint64_t RoundUp(uint64_t value, uint64_t step) {
  return (value + step - 1) / step * step;
}

absl::Status CheckFormat(const MatrixFormat& m) {
  if (IsSupported(m)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("no kernel multiplies groups of ", m.group_columns,
                                                 " columns of weight format ",
                                                 static_cast<int>(m.format)));
}

absl::Status CheckFormats(const StoreSpec& spec) {
  if (spec.formats.size() != 1 && spec.formats.size() != spec.moe_layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat(spec.formats.size(), " formats for ",
                                                   spec.moe_layers.size(), " layers of experts"));
  }
  for (const LayerFormat& layer : spec.formats) {
    RETURN_IF_ERROR(CheckFormat(layer.gate_up));
    RETURN_IF_ERROR(CheckFormat(layer.down));
    if (!QuantumFits(layer.down, spec.quantum)) {
      return absl::InvalidArgumentError(absl::StrCat("segments of ", spec.quantum,
                                                     " features cut groups of ",
                                                     layer.down.group_columns, " columns"));
    }
  }
  return absl::OkStatus();
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
  return CheckFormats(spec);
}

LayerEntry EntryOf(size_t slot, const LayerFormat& format) {
  return {static_cast<uint16_t>(slot), static_cast<uint8_t>(format.gate_up.format),
          static_cast<uint8_t>(format.down.format), format.gate_up.group_columns,
          format.down.group_columns};
}

std::string Differs(std::string_view field, uint64_t wanted, uint64_t found) {
  return absl::StrCat(std::string(field), " is ", found, " instead of ", wanted);
}

}  // namespace

absl::StatusOr<StoreManifest> MakeManifest(const StoreSpec& spec) {
  RETURN_IF_ERROR(CheckSpec(spec));
  StoreManifest m{};
  m.magic = kStoreMagic;
  m.version = kStoreVersion;
  m.layout_tag = kernels::LayoutTag(WeightFormat::kF32);  // the version: formats are named below
  m.model_hash = spec.model_hash;
  m.layers = spec.layers;
  m.slots = static_cast<uint32_t>(spec.moe_layers.size());
  m.experts = spec.experts;
  m.hidden = spec.hidden;
  m.intermediate = spec.intermediate;
  m.quantum = spec.quantum;
  m.segment_begin = spec.segments.begin;
  m.segment_end = spec.segments.end;
  m.activation_limit = spec.activation.limit;
  m.activation_alpha = spec.activation.alpha;
  m.activation_up_offset = spec.activation.up_offset;
  m.biases = spec.biases ? 1 : 0;
  for (LayerEntry& entry : m.layer) entry.slot = kNoSlot;
  for (size_t i = 0; i < spec.moe_layers.size(); ++i) {
    m.layer[spec.moe_layers[i]] = EntryOf(i, spec.formats[spec.formats.size() == 1 ? 0 : i]);
  }
  m.data_offset =
      RoundUp(sizeof(StoreManifest) + m.checksums() * sizeof(uint64_t), kStorePageBytes);
  m.file_bytes = m.data_offset;
  for (const SlotLayout& slot : LayoutsOf(m)) m.file_bytes += slot.block_bytes * m.experts;
  return m;
}

std::vector<SlotLayout> LayoutsOf(const StoreManifest& m) {
  using kernels::PanelBytes;
  std::vector<SlotLayout> layouts;
  uint64_t offset = m.data_offset;
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    const LayerEntry& entry = m.layer[layer];
    if (entry.slot == kNoSlot) continue;
    SlotLayout s{};
    s.format.gate_up = {static_cast<WeightFormat>(entry.gate_up_format),
                        entry.gate_up_group_columns};
    s.format.down = {static_cast<WeightFormat>(entry.down_format), entry.down_group_columns};
    s.gate_up_panel_bytes =
        PanelBytes(s.format.gate_up.format, m.hidden, s.format.gate_up.group_columns);
    s.down_panel_bytes = PanelBytes(s.format.down.format, m.quantum, s.format.down.group_columns);
    s.bias_offset = s.gate_up_panel_bytes * kernels::PanelCount(2 * m.quantum);
    const uint64_t bias_bytes = m.biases * 2 * m.quantum * sizeof(float);
    s.down_offset = s.bias_offset + RoundUp(bias_bytes, kernels::kPackAlignment);
    s.segment_bytes = RoundUp(s.down_offset + s.down_panel_bytes * kernels::PanelCount(m.hidden),
                              kStorePageBytes);
    const bool has_head = m.biases != 0 && m.segment_begin == 0 && m.segments() != 0;
    s.head_bytes = has_head ? RoundUp(m.hidden * sizeof(float), kStorePageBytes) : 0;
    s.block_bytes = s.head_bytes + m.segments() * s.segment_bytes;
    s.offset = offset;
    offset += s.block_bytes * m.experts;
    layouts.push_back(s);
  }
  return layouts;
}

std::string ManifestDifference(const StoreManifest& wanted, const StoreManifest& found) {
  if (wanted.version != found.version) return Differs("version", wanted.version, found.version);
  if (wanted.model_hash != found.model_hash) {
    return Differs("model_hash", wanted.model_hash, found.model_hash);
  }
  if (wanted.layout_tag != found.layout_tag) {
    return Differs("layout_tag", wanted.layout_tag, found.layout_tag);
  }
  if (wanted.segment_begin != found.segment_begin) {
    return Differs("segment_begin", wanted.segment_begin, found.segment_begin);
  }
  if (wanted.segment_end != found.segment_end) {
    return Differs("segment_end", wanted.segment_end, found.segment_end);
  }
  if (std::memcmp(wanted.layer, found.layer, sizeof(wanted.layer)) != 0) {
    return "the formats of the layers differ";
  }
  if (std::memcmp(&wanted, &found, offsetof(StoreManifest, checksum)) != 0) {
    return "the model's shape differs";
  }
  return "";
}

// Eight independent multiply-rotate chains over 64 bytes, folded at the end: a chain's step takes
// five cycles, so fewer would be slower than memory.
uint64_t StoreChecksum(const void* data, uint64_t bytes, uint64_t seed) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  constexpr uint64_t kLanes = 8;
  const char* p = static_cast<const char*>(data);
  uint64_t lanes[kLanes];
  for (uint64_t i = 0; i < kLanes; ++i) lanes[i] = (seed ^ i) * kOdd + i;
  const auto mix = [&](uint64_t& lane, uint64_t offset) {
    uint64_t word = 0;
    std::memcpy(&word, p + offset, sizeof(word));
    lane = std::rotl((lane ^ word) * kOdd, 29);
  };
  uint64_t offset = 0;
  for (; offset + 8 * kLanes <= bytes; offset += 8 * kLanes) {
#pragma GCC unroll 8
    for (uint64_t i = 0; i < kLanes; ++i) mix(lanes[i], offset + 8 * i);
  }
  for (; offset + 8 <= bytes; offset += 8) mix(lanes[0], offset);
  uint64_t sum = bytes;
  for (uint64_t lane : lanes) sum = std::rotl((sum ^ lane) * kOdd, 31);
  return sum ^ (sum >> 29);
}

}  // namespace tandem::expert
