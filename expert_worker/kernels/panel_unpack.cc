#include <algorithm>
#include <cstring>
#include <utility>

#include "expert_worker/kernels/exact_values.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::kernels {
namespace {

uint32_t LoadBits(const char* at, uint32_t bytes) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, bytes);
  return bits;
}

// Input j, output o of a panel, as it was given.
template <FormatTraits T>
inline void UnpackElement(const PanelView& panel, uint32_t j, uint32_t o, char* out) {
  const char* codes = panel.BlockOf(j) + panel.GeometryOfBlock(j).codes;
  const uint32_t i = j % kBlockInputs;
  if constexpr (T.codes == CodeStorage::kF32) {
    std::memcpy(out, codes + (size_t{i} * kPanelWidth + o) * 4, 4);
  } else if constexpr (T.codes == CodeStorage::kF16) {
    std::memcpy(out, codes + (size_t{i} * kPanelWidth + o) * 2, 2);
  } else if constexpr (T.codes == CodeStorage::kBf16) {
    std::memcpy(out, codes + size_t{i / 2} * 128 + (o / 16) * 64 + (o % 16) * 4 + j % 2 * 2, 2);
  } else if constexpr (T.codes == CodeStorage::kE4m3) {
    *out = codes[size_t{i} * kPanelWidth + o];
  } else {
    // Signed codes of eight bits are stored with their sign bit flipped.
    constexpr uint32_t kFlip = T.codes == CodeStorage::k8 ? T.offset : 0;
    *out = static_cast<char>(CodeOf<T>(panel, j, o) ^ kFlip);
  }
}

template <FormatTraits T>
GroupParameters ParametersOf(const PanelView& panel, uint32_t j, uint32_t o) {
  constexpr uint32_t kScale = ScaleBytes(T.scale), kMin = MinBytes(T.min);
  GroupParameters p;
  p.scale = LoadBits(panel.ScaleAt<T>(j, o), kScale);
  if constexpr (T.scale == ScaleType::kU4Pair) {
    p.min = p.scale >> 4;
    p.scale &= 15;
  } else if constexpr (T.min != MinType::kNone) {
    p.min = LoadBits(panel.MinsOf(j, kMin) + o * kMin, kMin);
  }
  if constexpr (T.super == SuperType::kF32Row) {
    p.super = LoadBits(panel.data + o * 4, 4);
  } else if constexpr (T.super != SuperType::kNone) {
    p.super = LoadBits(panel.BlockOf(j) + o * SuperBytes(T.super), SuperBytes(T.super));
  }
  return p;
}

// One row of one chunk, whose first input is column `done` of the matrix.
template <FormatTraits T>
void UnpackRow(const PanelView& panel, uint32_t o, uint32_t done, uint32_t inputs, size_t row,
               const UnpackTarget& target) {
  constexpr size_t kBytes = T.codes == CodeStorage::kF32                                    ? 4
                            : T.codes == CodeStorage::kF16 || T.codes == CodeStorage::kBf16 ? 2
                                                                                            : 1;
  char* out = static_cast<char*>(target.elements) + (row * target.row_stride + done) * kBytes;
  for (uint32_t j = 0; j < inputs; ++j) UnpackElement<T>(panel, j, o, out + j * kBytes);
  if constexpr (!IsPlain(T.format)) {
    GroupParameters* groups = target.groups + row * target.group_stride;
    const uint32_t columns = panel.group_columns;
    if (columns == 0) {
      groups[0] = ParametersOf<T>(panel, 0, o);
      return;
    }
    for (uint32_t j = 0; j < inputs; j += columns) {
      groups[(target.first_column + done + j) / columns] = ParametersOf<T>(panel, j, o);
    }
  }
}

template <FormatTraits T>
void Unpack(const PackedMatrix& w, uint32_t row_begin, uint32_t row_end,
            const UnpackTarget& target) {
  const PanelGeometry g = GeometryOf(T.format, w.k_chunk, w.group_columns);
  for (uint32_t done = 0; done < w.k; done += w.k_chunk) {
    const char* chunk =
        static_cast<const char*>(w.data) + size_t{done / w.k_chunk} * w.chunk_stride_bytes;
    const uint32_t inputs = std::min(w.k_chunk, w.k - done);
    for (uint32_t o = row_begin; o < row_end; ++o) {
      const PanelView panel{chunk + size_t{o / kPanelWidth} * w.panel_stride_bytes, g,
                            w.group_columns};
      UnpackRow<T>(panel, o % kPanelWidth, done, inputs, o - row_begin, target);
    }
  }
}

using UnpackFunction = void (*)(const PackedMatrix&, uint32_t, uint32_t, const UnpackTarget&);

template <size_t... kIndex>
constexpr UnpackFunction UnpackFunctionOf(uint32_t format, std::index_sequence<kIndex...>) {
  constexpr UnpackFunction kFunctions[] = {Unpack<kFormats[kIndex]>...};
  return kFunctions[format];
}

}  // namespace

void UnpackRows(WeightFormat format, const PackedMatrix& w, uint32_t row_begin, uint32_t row_end,
                const UnpackTarget& target) {
  UnpackFunctionOf(static_cast<uint32_t>(format), std::make_index_sequence<kFormatCount>{})(
      w, row_begin, row_end, target);
}

}  // namespace tandem::kernels
