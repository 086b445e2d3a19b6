#include "expert_worker/engine/store_packer.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::expert {
namespace {

// Keeps the first error; others see that there is one and stop.
class FirstError {
 public:
  bool any() const { return any_.load(std::memory_order_relaxed); }
  void Set(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok()) status_ = status;
    any_.store(true, std::memory_order_relaxed);
  }
  absl::Status Take() const { return status_; }

 private:
  std::mutex mutex_;
  absl::Status status_;
  std::atomic<bool> any_{false};
};

struct ExpertBlock {
  uint64_t index;  // slot * experts + expert
  int layer;
  int expert;
};

class Packer {
 public:
  Packer(const StoreManifest& manifest, const ExpertSource& source, char* base)
      : manifest_(manifest),
        source_(source),
        base_(base),
        dtype_(source.native_dtype()),
        element_bytes_(DTypeBytes(dtype_)),
        first_(manifest.segment_begin * manifest.quantum),
        end_(std::min(manifest.segment_end * manifest.quantum, manifest.intermediate)) {}

  absl::Status Pack(const ExpertBlock& block, std::vector<char>& buffer) const {
    const uint64_t block_bytes = manifest_.segment_bytes * segments();
    char* out = base_ + manifest_.data_offset + block.index * block_bytes;
    RETURN_IF_ERROR(PackGateUp(block, buffer, out));
    RETURN_IF_ERROR(PackDown(block, buffer, out));
    reinterpret_cast<uint64_t*>(base_ + sizeof(StoreManifest))[block.index] =
        StoreChecksum(out, block_bytes, block.index);
    return absl::OkStatus();
  }

 private:
  WeightFormat format() const { return static_cast<WeightFormat>(manifest_.format); }
  uint32_t segments() const { return manifest_.segment_end - manifest_.segment_begin; }

  kernels::PackSource Source(const void* data, size_t row_stride) const {
    kernels::PackSource source{};
    source.data = data;
    source.row_stride = row_stride;
    source.format = dtype_ == DType::kBF16 ? WeightFormat::kBf16 : WeightFormat::kF32;
    return source;
  }

  absl::Status PackGateUp(const ExpertBlock& block, std::vector<char>& buffer, char* out) const {
    const uint32_t hidden = manifest_.hidden;
    buffer.resize(size_t{2} * manifest_.quantum * hidden * element_bytes_);
    for (uint32_t s = 0; s < segments(); ++s, out += manifest_.segment_bytes) {
      const uint32_t begin = first_ + s * manifest_.quantum;
      const uint32_t width = std::min(manifest_.quantum, end_ - begin);
      const Range rows{begin, begin + width};
      char* up = buffer.data() + size_t{width} * hidden * element_bytes_;
      RETURN_IF_ERROR(source_.Read(block.layer, block.expert, ExpertPart::kGate, rows, {0, hidden},
                                   dtype_, buffer.data()));
      RETURN_IF_ERROR(
          source_.Read(block.layer, block.expert, ExpertPart::kUp, rows, {0, hidden}, dtype_, up));
      kernels::PackPanels(format(), manifest_.group_columns, Source(buffer.data(), hidden),
                          2 * width, hidden, hidden, out);
    }
    return absl::OkStatus();
  }

  // The columns of the whole range are read at once: a row of one segment is only 64 bytes of file.
  absl::Status PackDown(const ExpertBlock& block, std::vector<char>& buffer, char* out) const {
    const uint32_t hidden = manifest_.hidden;
    const uint32_t columns = end_ - first_;
    buffer.resize(size_t{hidden} * columns * element_bytes_);
    RETURN_IF_ERROR(source_.Read(block.layer, block.expert, ExpertPart::kDown, {0, hidden},
                                 {first_, end_}, dtype_, buffer.data()));
    for (uint32_t s = 0; s < segments(); ++s, out += manifest_.segment_bytes) {
      const uint32_t begin = s * manifest_.quantum;
      kernels::PackPanels(format(), manifest_.group_columns,
                          Source(buffer.data() + begin * element_bytes_, columns), hidden,
                          std::min(manifest_.quantum, columns - begin), manifest_.quantum,
                          out + manifest_.down_offset);
    }
    return absl::OkStatus();
  }

  const StoreManifest& manifest_;
  const ExpertSource& source_;
  char* const base_;
  const DType dtype_;
  const size_t element_bytes_;
  const uint32_t first_;  // intermediate features [first_, end_) are owned
  const uint32_t end_;
};

std::vector<ExpertBlock> AllBlocks(const StoreManifest& manifest) {
  std::vector<ExpertBlock> blocks;
  for (uint32_t layer = 0; layer < manifest.layers; ++layer) {
    const uint16_t slot = manifest.layer_slot[layer];
    if (slot == kNoSlot) continue;
    for (uint32_t expert = 0; expert < manifest.experts; ++expert) {
      blocks.push_back({uint64_t{slot} * manifest.experts + expert, static_cast<int>(layer),
                        static_cast<int>(expert)});
    }
  }
  return blocks;
}

}  // namespace

absl::Status PackExperts(const StoreManifest& manifest, const ExpertSource& source, int threads,
                         LoadProgress* progress, char* base) {
  if (manifest.segment_end == manifest.segment_begin) return absl::OkStatus();
  const std::vector<ExpertBlock> blocks = AllBlocks(manifest);
  const Packer packer(manifest, source, base);
  const uint64_t block_bytes =
      manifest.segment_bytes * (manifest.segment_end - manifest.segment_begin);
  FirstError error;
  oneapi::tbb::task_arena arena(threads);
  arena.execute([&] {
    oneapi::tbb::parallel_for(
        oneapi::tbb::blocked_range<size_t>(0, blocks.size(), 1), [&](const auto& range) {
          std::vector<char> buffer;
          for (size_t i = range.begin(); i < range.end() && !error.any(); ++i) {
            if (progress->cancel.load(std::memory_order_relaxed)) {
              error.Set(absl::CancelledError("loading was cancelled"));
              return;
            }
            const absl::Status status = packer.Pack(blocks[i], buffer);
            if (!status.ok()) error.Set(status);
            progress->loaded_bytes.fetch_add(block_bytes, std::memory_order_relaxed);
          }
        });
  });
  return error.Take();
}

absl::Status VerifyChecksums(const StoreManifest& manifest, const char* base) {
  const uint64_t block_bytes =
      manifest.segment_bytes * (manifest.segment_end - manifest.segment_begin);
  if (block_bytes == 0) return absl::OkStatus();
  const auto* table = reinterpret_cast<const uint64_t*>(base + sizeof(StoreManifest));
  const std::vector<ExpertBlock> blocks = AllBlocks(manifest);
  FirstError error;
  oneapi::tbb::parallel_for(size_t{0}, blocks.size(), [&](size_t i) {
    const ExpertBlock& block = blocks[i];
    if (error.any()) return;
    const char* data = base + manifest.data_offset + block.index * block_bytes;
    if (StoreChecksum(data, block_bytes, block.index) == table[block.index]) return;
    error.Set(absl::DataLossError(absl::StrCat("packed weights of layer ", block.layer, ", expert ",
                                               block.expert, " do not match their checksum")));
  });
  return error.Take();
}

}  // namespace tandem::expert
