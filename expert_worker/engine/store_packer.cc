#include "expert_worker/engine/store_packer.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "expert_worker/engine/first_error.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::expert {
namespace {

struct ExpertBlock {
  uint32_t slot;
  uint32_t layer;
  uint32_t expert;
};

// The checksums of a block's held segments.
uint64_t* ChecksumsOf(const StoreManifest& manifest, uint32_t slot, uint32_t expert, char* base) {
  return reinterpret_cast<uint64_t*>(base + sizeof(StoreManifest)) +
         (uint64_t{slot} * manifest.experts + expert) * manifest.segments();
}

const uint64_t* ChecksumsOf(const StoreManifest& manifest, uint32_t slot, uint32_t expert,
                            const char* base) {
  return ChecksumsOf(manifest, slot, expert, const_cast<char*>(base));
}

// Of held segment `s` of a block.
uint64_t SegmentChecksum(const StoreManifest& manifest, const SlotLayout& layout,
                         const ExpertBlock& block, uint32_t s, const char* base) {
  const char* data = base + layout.offset + block.expert * layout.block_bytes;
  const uint64_t begin = s == 0 ? 0 : layout.head_bytes + s * layout.segment_bytes;
  const uint64_t end = layout.head_bytes + (s + 1) * layout.segment_bytes;
  return StoreChecksum(data + begin, end - begin,
                       ChecksumSeed(block.slot, block.expert, manifest.segment_begin + s));
}

// Room for what one expert's source holds; one a thread, reused.
struct Buffer {
  std::vector<char> data;
  std::vector<GroupParameters> groups;
};

class Packer {
 public:
  Packer(const StoreManifest& manifest, const ExpertSource& source, char* base)
      : manifest_(manifest),
        source_(source),
        base_(base),
        layouts_(LayoutsOf(manifest)),
        first_(manifest.segment_begin * manifest.quantum),
        end_(std::min(manifest.segment_end * manifest.quantum, manifest.intermediate)) {}

  absl::Status Pack(const ExpertBlock& block, Buffer& buffer) const {
    const SlotLayout& layout = layouts_[block.slot];
    char* out = base_ + layout.offset + block.expert * layout.block_bytes;
    if (manifest_.biases != 0) RETURN_IF_ERROR(PackBiases(block, layout, out));
    RETURN_IF_ERROR(PackGateUp(block, layout, buffer, out + layout.head_bytes));
    RETURN_IF_ERROR(PackDown(block, layout, buffer, out + layout.head_bytes));
    uint64_t* checksums = ChecksumsOf(manifest_, block.slot, block.expert, base_);
    for (uint32_t s = 0; s < manifest_.segments(); ++s) {
      checksums[s] = SegmentChecksum(manifest_, layout, block, s, base_);
    }
    return absl::OkStatus();
  }

  uint64_t block_bytes(const ExpertBlock& block) const { return layouts_[block.slot].block_bytes; }

 private:
  ExpertMatrix Matrix(const ExpertBlock& block, ExpertPart part) const {
    return {static_cast<int>(block.layer), static_cast<int>(block.expert), part};
  }

  // Reads a rectangle to row `at` of a buffer for `rows` rows of `cols`.
  absl::Status Read(const ExpertMatrix& matrix, const MatrixFormat& packed, Range rows, Range cols,
                    size_t at, Buffer& buffer) const {
    const auto width = static_cast<size_t>(cols.size());
    if (IsPlain(packed.format)) {
      const size_t bytes = packed.format == WeightFormat::kF32 ? 4 : 2;
      return source_.ReadElements(matrix, rows, cols, packed.format,
                                  buffer.data.data() + at * width * bytes);
    }
    const uint32_t touched = GroupsTouched(static_cast<uint32_t>(cols.begin),
                                           static_cast<uint32_t>(cols.end), packed.group_columns);
    return source_.ReadCodes(matrix, rows, cols,
                             reinterpret_cast<uint8_t*>(buffer.data.data()) + at * width,
                             buffer.groups.data() + at * touched);
  }

  void Resize(Buffer& buffer, const MatrixFormat& packed, size_t rows, Range cols) const {
    const size_t bytes = packed.format == WeightFormat::kF32 ? 4 : IsPlain(packed.format) ? 2 : 1;
    buffer.data.resize(rows * static_cast<size_t>(cols.size()) * bytes);
    if (IsPlain(packed.format)) return;
    buffer.groups.resize(rows * GroupsTouched(static_cast<uint32_t>(cols.begin),
                                              static_cast<uint32_t>(cols.end),
                                              packed.group_columns));
  }

  // The buffer's columns from `column` on, as what PackPanels reads. The buffer begins at column
  // `begin` of the matrix and holds `width` of them.
  static kernels::PackSource SourceOf(const Buffer& buffer, const MatrixFormat& packed,
                                      uint32_t begin, uint32_t width, uint32_t column) {
    kernels::PackSource source{};
    source.format = packed.format;
    source.row_stride = width;
    if (IsPlain(packed.format)) {
      const size_t bytes = packed.format == WeightFormat::kF32 ? 4 : 2;
      source.data = buffer.data.data() + column * bytes;
      return source;
    }
    const uint32_t g = packed.group_columns;
    QuantizedView& view = source.quantized;
    view.codes = reinterpret_cast<const uint8_t*>(buffer.data.data()) + column;
    view.code_stride = width;
    view.group_stride = GroupsTouched(begin, begin + width, g);
    view.groups = buffer.groups.data() + (g == 0 ? 0 : (begin + column) / g - begin / g);
    view.group_columns = g;
    view.first_column = begin + column;
    return source;
  }

  absl::Status PackGateUp(const ExpertBlock& block, const SlotLayout& layout, Buffer& buffer,
                          char* out) const {
    const MatrixFormat& format = layout.format.gate_up;
    const uint32_t hidden = manifest_.hidden;
    const Range cols{0, hidden};
    for (uint32_t begin = first_; begin < end_; begin += manifest_.quantum) {
      const uint32_t width = std::min(manifest_.quantum, end_ - begin);
      const Range rows{begin, begin + width};
      Resize(buffer, format, size_t{2} * width, cols);
      RETURN_IF_ERROR(Read(Matrix(block, ExpertPart::kGate), format, rows, cols, 0, buffer));
      RETURN_IF_ERROR(Read(Matrix(block, ExpertPart::kUp), format, rows, cols, width, buffer));
      kernels::PackPanels(format.format, format.group_columns,
                          SourceOf(buffer, format, 0, hidden, 0), 2 * width, hidden, hidden, out);
      out += layout.segment_bytes;
    }
    return absl::OkStatus();
  }

  // The columns of the whole range are read at once: a row of one segment is only 64 bytes of file.
  absl::Status PackDown(const ExpertBlock& block, const SlotLayout& layout, Buffer& buffer,
                        char* out) const {
    const MatrixFormat& format = layout.format.down;
    const uint32_t hidden = manifest_.hidden;
    const uint32_t columns = end_ - first_;
    const Range cols{first_, end_};
    Resize(buffer, format, hidden, cols);
    RETURN_IF_ERROR(Read(Matrix(block, ExpertPart::kDown), format, {0, hidden}, cols, 0, buffer));
    for (uint32_t begin = 0; begin < columns; begin += manifest_.quantum) {
      kernels::PackPanels(format.format, format.group_columns,
                          SourceOf(buffer, format, first_, columns, begin), hidden,
                          std::min(manifest_.quantum, columns - begin), manifest_.quantum,
                          out + layout.down_offset);
      out += layout.segment_bytes;
    }
    return absl::OkStatus();
  }

  absl::Status PackBiases(const ExpertBlock& block, const SlotLayout& layout, char* out) const {
    if (layout.head_bytes != 0) {
      RETURN_IF_ERROR(source_.ReadBias(Matrix(block, ExpertPart::kDown), {0, manifest_.hidden},
                                       reinterpret_cast<float*>(out)));
    }
    out += layout.head_bytes + layout.bias_offset;
    for (uint32_t begin = first_; begin < end_; begin += manifest_.quantum) {
      const uint32_t width = std::min(manifest_.quantum, end_ - begin);
      const Range rows{begin, begin + width};
      auto* bias = reinterpret_cast<float*>(out);
      RETURN_IF_ERROR(source_.ReadBias(Matrix(block, ExpertPart::kGate), rows, bias));
      RETURN_IF_ERROR(source_.ReadBias(Matrix(block, ExpertPart::kUp), rows, bias + width));
      out += layout.segment_bytes;
    }
    return absl::OkStatus();
  }

  const StoreManifest& manifest_;
  const ExpertSource& source_;
  char* const base_;
  const std::vector<SlotLayout> layouts_;
  const uint32_t first_;  // intermediate features [first_, end_) are owned
  const uint32_t end_;
};

std::vector<ExpertBlock> AllBlocks(const StoreManifest& manifest) {
  std::vector<ExpertBlock> blocks;
  if (manifest.segments() == 0) return blocks;
  for (uint32_t layer = 0; layer < manifest.layers; ++layer) {
    const uint32_t slot = manifest.layer[layer].slot;
    if (slot == kNoSlot) continue;
    for (uint32_t expert = 0; expert < manifest.experts; ++expert) {
      blocks.push_back({slot, layer, expert});
    }
  }
  return blocks;
}

}  // namespace

absl::Status PackExperts(const StoreManifest& manifest, const ExpertSource& source, int threads,
                         LoadProgress* progress, char* base) {
  const std::vector<ExpertBlock> blocks = AllBlocks(manifest);
  const Packer packer(manifest, source, base);
  FirstError error;
  oneapi::tbb::task_arena arena(threads);
  arena.execute([&] {
    oneapi::tbb::parallel_for(
        oneapi::tbb::blocked_range<size_t>(0, blocks.size(), 1), [&](const auto& range) {
          Buffer buffer;
          for (size_t i = range.begin(); i < range.end() && !error.any(); ++i) {
            if (progress->cancel.load(std::memory_order_relaxed)) {
              error.Set(absl::CancelledError("loading was cancelled"));
              return;
            }
            const absl::Status status = packer.Pack(blocks[i], buffer);
            if (!status.ok()) error.Set(status);
            progress->loaded_bytes.fetch_add(packer.block_bytes(blocks[i]),
                                             std::memory_order_relaxed);
          }
        });
  });
  return error.Take();
}

absl::Status VerifyChecksums(const StoreManifest& manifest, SegmentRange range, const char* base) {
  const std::vector<ExpertBlock> blocks = AllBlocks(manifest);
  const std::vector<SlotLayout> layouts = LayoutsOf(manifest);
  FirstError error;
  oneapi::tbb::parallel_for(size_t{0}, blocks.size(), [&](size_t i) {
    const ExpertBlock& block = blocks[i];
    for (uint32_t segment = range.begin; segment < range.end && !error.any(); ++segment) {
      const uint32_t s = segment - manifest.segment_begin;
      if (SegmentChecksum(manifest, layouts[block.slot], block, s, base) ==
          ChecksumsOf(manifest, block.slot, block.expert, base)[s]) {
        continue;
      }
      error.Set(absl::DataLossError(absl::StrCat("packed weights of layer ", block.layer,
                                                 ", expert ", block.expert, ", segment ", segment,
                                                 " do not match their checksum")));
    }
  });
  return error.Take();
}

}  // namespace tandem::expert
