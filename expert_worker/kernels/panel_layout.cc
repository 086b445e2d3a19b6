#include "expert_worker/kernels/panel_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "expert_worker/kernels/exact_values.h"

namespace tandem::kernels {
namespace {

// Bumped when the meaning of packed bytes changes.
constexpr uint32_t kLayoutVersion = 6;

float ElementAsF32(const PackSource& source, size_t index) {
  switch (source.format) {
    case WeightFormat::kBf16:
      return Bf16Value(static_cast<const uint16_t*>(source.data)[index]);
    case WeightFormat::kF16:
      return F16Value(static_cast<const uint16_t*>(source.data)[index]);
    default:
      return static_cast<const float*>(source.data)[index];
  }
}

// Nearest, ties to even; a NaN keeps its upper bits and stays a NaN.
uint16_t Bf16Bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Steps packed at a time, so that both sides stay in the L1 cache.
constexpr uint32_t kPackSteps = 64;

template <FormatTraits T>
void PackPlainCodes(const PackSource& source, uint32_t first, uint32_t width, uint32_t k,
                    char* codes) {
  for (uint32_t j0 = 0; j0 < k; j0 += kPackSteps) {
    const uint32_t j1 = std::min(k, j0 + kPackSteps);
    for (uint32_t o = 0; o < width; ++o) {
      const size_t row = (size_t{first} + o) * source.row_stride;
      for (uint32_t j = j0; j < j1; ++j) {
        if constexpr (T.codes == CodeStorage::kF32) {
          const float value = ElementAsF32(source, row + j);
          std::memcpy(codes + (size_t{j} * kPanelWidth + o) * 4, &value, 4);
        } else {
          const bool same = source.format == T.format;
          const auto* elements = static_cast<const uint16_t*>(source.data);
          const uint16_t bits = same ? elements[row + j] : Bf16Bits(ElementAsF32(source, row + j));
          char* to = T.codes == CodeStorage::kF16
                         ? codes + (size_t{j} * kPanelWidth + o) * 2
                         : codes + size_t{j / 2} * 128 + (o / 16) * 64 + (o % 16) * 4 + j % 2 * 2;
          std::memcpy(to, &bits, 2);
        }
      }
    }
  }
}

// Adds the code of input j (of the block), output o to a zeroed block.
template <FormatTraits T>
inline void PutCode(char* block, const BlockGeometry& g, uint32_t j, uint32_t o, uint32_t code) {
  const uint32_t step = j / 4;
  const uint32_t byte = 4 * (o % 16) + j % 4;
  const uint32_t half = o / 16;
  const auto merge = [&](size_t at, uint32_t bits) {
    block[at] = static_cast<char>(static_cast<uint8_t>(block[at]) | bits);
  };
  if constexpr (T.codes == CodeStorage::kE4m3) {
    block[g.codes + size_t{j} * kPanelWidth + o] = static_cast<char>(code);
  } else if constexpr (T.codes == CodeStorage::k8) {
    block[g.codes + size_t{step} * 128 + half * 64 + byte] = static_cast<char>(code ^ T.offset);
  } else {
    if constexpr (T.codes == CodeStorage::k4 || T.codes == CodeStorage::k5 ||
                  T.codes == CodeStorage::k6) {
      merge(g.codes + size_t{step} * 64 + byte, (code & 15u) << (4 * half));
    }
    if constexpr (T.codes == CodeStorage::k6 || T.codes == CodeStorage::k2 ||
                  T.codes == CodeStorage::k3) {
      const uint32_t two = T.codes == CodeStorage::k6 ? code >> 4 : code & 3u;
      merge(g.plane + size_t{step / 2} * 64 + byte, (two & 3u) << (2 * (step % 2 * 2 + half)));
    }
    if constexpr (T.codes == CodeStorage::k5 || T.codes == CodeStorage::k3) {
      const uint32_t bit = (T.codes == CodeStorage::k5 ? code >> 4 : code >> 2) & 1u;
      merge(g.bit_plane + size_t{step / 4} * 64 + byte, bit << (step % 4 * 2 + half));
    }
  }
}

// The parameters of column j of the source's row `row`.
const GroupParameters& ParametersOf(const QuantizedView& view, size_t row, uint32_t j) {
  const uint32_t s = view.group_columns;
  const uint32_t group = s == 0 ? 0 : (view.first_column + j) / s - view.first_column / s;
  return view.groups[row * view.group_stride + group];
}

void PutBytes(char* at, size_t index, uint32_t bytes, uint32_t bits) {
  std::memcpy(at + index * bytes, &bits, bytes);
}

// The 32 scales and minima of group `group` of a block, or 0 of the panel, which begins at column
// j.
template <FormatTraits T>
void PackGroup(const QuantizedView& view, uint32_t first, uint32_t width, uint32_t j,
               uint32_t group, char* scales, char* mins) {
  for (uint32_t o = 0; o < width; ++o) {
    const GroupParameters& p = ParametersOf(view, size_t{first} + o, j);
    char* scale = scales + ScaleOffset(T, group, o);
    if constexpr (T.scale == ScaleType::kU4Pair) {
      PutBytes(scale, 0, 1, (p.scale & 15) | (p.min & 15) << 4);
    } else {
      PutBytes(scale, 0, ScaleBytes(T.scale), p.scale);
      const size_t at = size_t{group} * kPanelWidth + o;
      if constexpr (T.min != MinType::kNone) PutBytes(mins, at, MinBytes(T.min), p.min);
    }
  }
}

// Columns [begin, begin + count) as the block at `block`.
template <FormatTraits T>
void PackBlock(const QuantizedView& view, uint32_t group_columns, uint32_t first, uint32_t width,
               uint32_t begin, uint32_t count, const BlockGeometry& g, char* block) {
  for (uint32_t j0 = 0; j0 < count; j0 += kPackSteps) {
    const uint32_t j1 = std::min(count, j0 + kPackSteps);
    for (uint32_t o = 0; o < width; ++o) {
      const uint8_t* row = view.codes + (size_t{first} + o) * view.code_stride + begin;
      for (uint32_t j = j0; j < j1; ++j) PutCode<T>(block, g, j, o, row[j]);
    }
  }
  for (uint32_t i = 0; group_columns != 0 && i * group_columns < count; ++i) {
    PackGroup<T>(view, first, width, begin + i * group_columns, i, block + g.scales,
                 block + g.mins);
  }
  if constexpr (T.super == SuperType::kF16 || T.super == SuperType::kF16Pair) {
    for (uint32_t o = 0; o < width; ++o) {
      PutBytes(block, o, SuperBytes(T.super), ParametersOf(view, size_t{first} + o, begin).super);
    }
  }
}

template <FormatTraits T>
void PackQuantized(const QuantizedView& view, uint32_t group_columns, uint32_t first,
                   uint32_t width, uint32_t k, const PanelGeometry& g, char* panel) {
  if constexpr (T.super == SuperType::kF32Row) {
    for (uint32_t o = 0; o < width; ++o) {
      PutBytes(panel, o, 4, ParametersOf(view, size_t{first} + o, 0).super);
    }
  }
  if (group_columns == 0) {
    PackGroup<T>(view, first, width, 0, 0, panel + g.head_scales, panel + g.head_mins);
  }
  for (uint32_t b = 0; b * kBlockInputs < k; ++b) {
    const uint32_t begin = b * kBlockInputs;
    PackBlock<T>(view, group_columns, first, width, begin, std::min(kBlockInputs, k - begin),
                 g.Block(b), panel + g.BlockOffset(b));
  }
}

template <FormatTraits T>
void Pack(uint32_t group_columns, const PackSource& source, uint32_t n, uint32_t k,
          uint32_t k_chunk, void* panels) {
  const PanelGeometry g = GeometryOf(T.format, k_chunk, group_columns);
  char* panel = static_cast<char*>(panels);
  for (uint32_t first = 0; first < n; first += kPanelWidth, panel += g.bytes) {
    const uint32_t width = std::min(kPanelWidth, n - first);
    std::memset(panel, 0, g.bytes);
    if constexpr (IsPlain(T.format)) {
      PackPlainCodes<T>(source, first, width, k, panel);
    } else {
      PackQuantized<T>(source.quantized, group_columns, first, width, k, g, panel);
    }
  }
}

template <FormatTraits T>
void Unpack(const PackedMatrix& w, float* out) {
  const PanelGeometry g = GeometryOf(T.format, w.k_chunk, w.group_columns);
  for (uint32_t done = 0; done < w.k; done += w.k_chunk) {
    const char* chunk =
        static_cast<const char*>(w.data) + size_t{done / w.k_chunk} * w.chunk_stride_bytes;
    const uint32_t steps = std::min(w.k_chunk, w.k - done);
    for (uint32_t o = 0; o < w.n; ++o) {
      const PanelView panel{chunk + size_t{o / kPanelWidth} * w.panel_stride_bytes, g,
                            w.group_columns};
      float* row = out + size_t{o} * w.k + done;
      for (uint32_t j = 0; j < steps; ++j) row[j] = ExactValue<T>(panel, j, o % kPanelWidth);
    }
  }
}

using PackFunction = void (*)(uint32_t, const PackSource&, uint32_t, uint32_t, uint32_t, void*);
using UnpackFunction = void (*)(const PackedMatrix&, float*);

template <size_t... kIndex>
constexpr PackFunction PackFunctionOf(uint32_t format, std::index_sequence<kIndex...>) {
  constexpr PackFunction kFunctions[] = {Pack<kFormats[kIndex]>...};
  return kFunctions[format];
}

template <size_t... kIndex>
constexpr UnpackFunction UnpackFunctionOf(uint32_t format, std::index_sequence<kIndex...>) {
  constexpr UnpackFunction kFunctions[] = {Unpack<kFormats[kIndex]>...};
  return kFunctions[format];
}

using AllFormats = std::make_index_sequence<kFormatCount>;

}  // namespace

uint32_t LayoutTag(WeightFormat format) {
  return kLayoutVersion << 8 | static_cast<uint32_t>(format);
}

size_t PanelBytes(WeightFormat format, uint32_t k, uint32_t group_columns) {
  return GeometryOf(format, k, group_columns).bytes;
}

void PackPanels(WeightFormat format, uint32_t group_columns, const PackSource& source, uint32_t n,
                uint32_t k, uint32_t k_chunk, void* panels) {
  PackFunctionOf(static_cast<uint32_t>(format), AllFormats{})(group_columns, source, n, k, k_chunk,
                                                              panels);
}

void UnpackPanels(WeightFormat format, const PackedMatrix& w, float* out) {
  UnpackFunctionOf(static_cast<uint32_t>(format), AllFormats{})(w, out);
}

}  // namespace tandem::kernels
