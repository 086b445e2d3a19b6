#include "expert_worker/kernels/layout_plain.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tandem::kernels {
namespace {

constexpr uint32_t kHalf = kPanelWidth / 2;
// Steps packed at a time: 64 steps of 32 outputs of BF16 are 4 KiB, so both sides stay in L1.
constexpr uint32_t kPackSteps = 64;

struct F32Layout {
  using Element = float;
  static constexpr uint32_t Index(uint32_t output) { return output; }
  static float FromF32(float v) { return v; }
  static float FromBf16(uint16_t v) { return std::bit_cast<float>(uint32_t{v} << 16); }
  static float ToF32(float v) { return v; }
};

struct Bf16Layout {
  using Element = uint16_t;
  static constexpr uint32_t Index(uint32_t output) { return 2 * (output % kHalf) + output / kHalf; }
  // Nearest, ties to even; a NaN keeps its upper bits and stays a NaN.
  static uint16_t FromF32(float v) {
    const uint32_t bits = std::bit_cast<uint32_t>(v);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
  static uint16_t FromBf16(uint16_t v) { return v; }
  static float ToF32(uint16_t v) { return std::bit_cast<float>(uint32_t{v} << 16); }
};

template <typename Layout>
typename Layout::Element Load(const PackSource& source, size_t index) {
  if (source.type == SourceType::kBf16) {
    return Layout::FromBf16(static_cast<const uint16_t*>(source.data)[index]);
  }
  return Layout::FromF32(static_cast<const float*>(source.data)[index]);
}

template <typename Layout>
size_t PanelBytes(uint32_t k) {
  return size_t{k} * kPanelWidth * sizeof(typename Layout::Element);
}

template <typename Layout>
void Pack(const PackSource& source, uint32_t n, uint32_t k, uint32_t k_chunk, void* panels) {
  using Element = typename Layout::Element;
  for (uint32_t first = 0; first < n; first += kPanelWidth) {
    Element* panel = static_cast<Element*>(panels) + size_t{first} * k_chunk;
    const uint32_t width = std::min(kPanelWidth, n - first);
    if (width < kPanelWidth || k < k_chunk) std::memset(panel, 0, PanelBytes<Layout>(k_chunk));
    for (uint32_t j0 = 0; j0 < k; j0 += kPackSteps) {
      const uint32_t j1 = std::min(k, j0 + kPackSteps);
      for (uint32_t o = 0; o < width; ++o) {
        const size_t row = (size_t{first} + o) * source.row_stride;
        Element* out = panel + Layout::Index(o);
        for (uint32_t j = j0; j < j1; ++j) {
          out[size_t{j} * kPanelWidth] = Load<Layout>(source, row + j);
        }
      }
    }
  }
}

template <typename Layout>
void Unpack(const PackedMatrix& w, float* out) {
  using Element = typename Layout::Element;
  for (uint32_t j = 0; j < w.k; ++j) {
    const char* chunk =
        static_cast<const char*>(w.data) + size_t{j / w.k_chunk} * w.chunk_stride_bytes;
    for (uint32_t o = 0; o < w.n; ++o) {
      const auto* panel =
          reinterpret_cast<const Element*>(chunk + size_t{o / kPanelWidth} * w.panel_stride_bytes);
      const size_t index = size_t{j % w.k_chunk} * kPanelWidth + Layout::Index(o % kPanelWidth);
      out[size_t{o} * w.k + j] = Layout::ToF32(panel[index]);
    }
  }
}

}  // namespace

size_t PanelBytesF32(uint32_t k) { return PanelBytes<F32Layout>(k); }
void PackF32(const PackSource& source, uint32_t n, uint32_t k, uint32_t k_chunk, void* panels) {
  Pack<F32Layout>(source, n, k, k_chunk, panels);
}
void UnpackF32(const PackedMatrix& w, float* out) { Unpack<F32Layout>(w, out); }

size_t PanelBytesBf16(uint32_t k) { return PanelBytes<Bf16Layout>(k); }
void PackBf16(const PackSource& source, uint32_t n, uint32_t k, uint32_t k_chunk, void* panels) {
  Pack<Bf16Layout>(source, n, k, k_chunk, panels);
}
void UnpackBf16(const PackedMatrix& w, float* out) { Unpack<Bf16Layout>(w, out); }

}  // namespace tandem::kernels
