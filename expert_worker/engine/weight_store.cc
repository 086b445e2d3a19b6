#include "expert_worker/engine/weight_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "expert_worker/engine/store_mapping.h"
#include "expert_worker/engine/store_packer.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace tandem::expert {
namespace {

std::string Reason() { return std::strerror(errno); }

bool IsSealed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)) != 0;
}

uint64_t ManifestChecksum(const StoreManifest& manifest, const char* base) {
  const uint64_t table_bytes = manifest.checksums() * sizeof(uint64_t);
  const uint64_t head = StoreChecksum(&manifest, offsetof(StoreManifest, checksum), 0);
  return StoreChecksum(base + sizeof(StoreManifest), table_bytes, head);
}

// The manifest is read once into private memory; only then are its fields believed.
absl::Status CheckManifest(const StoreManifest& found, const StoreManifest& wanted,
                           uint64_t file_bytes, const char* base) {
  if (found.magic == 0) return absl::NotFoundError("the weight store is empty");
  if (found.magic != kStoreMagic) {
    return absl::FailedPreconditionError("the file is not a weight store");
  }
  if (found.complete != kStoreComplete) {
    return absl::DataLossError("the weight store was not written to its end");
  }
  const std::string difference = ManifestDifference(wanted, found);
  if (!difference.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the weight store is another one: ", difference));
  }
  if (file_bytes < found.file_bytes) {
    return absl::DataLossError(
        absl::StrCat("the weight store has ", file_bytes, " bytes of ", found.file_bytes));
  }
  if (ManifestChecksum(found, base) != found.checksum) {
    return absl::DataLossError("the manifest of the weight store does not match its checksum");
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> FileBytes(int fd) {
  struct stat st {};
  if (fstat(fd, &st) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("weight store descriptor ", fd, ": ", Reason()));
  }
  return static_cast<uint64_t>(st.st_size);
}

absl::Status Resize(int fd, uint64_t bytes) {
  const uint64_t step = IsHugeTlb(fd) ? kHugePageBytes : 1;
  const uint64_t rounded = (bytes + step - 1) / step * step;
  ASSIGN_OR_RETURN(const uint64_t current, FileBytes(fd));
  // A file of another store may be larger: old bytes must not be taken for new ones.
  if (current != 0 && current != rounded && ftruncate(fd, 0) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("cannot empty the weight store: ", Reason()));
  }
  if (ftruncate(fd, static_cast<off_t>(rounded)) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot size the weight store to ", rounded, " bytes: ", Reason()));
  }
  return absl::OkStatus();
}

// Maps a file that is `spec`'s store by its manifest, which goes to `found`.
absl::StatusOr<StoreMapping> MapChecked(int fd, const StoreSpec& spec, StoreManifest* found) {
  ASSIGN_OR_RETURN(const StoreManifest wanted, MakeManifest(spec));
  ASSIGN_OR_RETURN(const uint64_t file_bytes, FileBytes(fd));
  if (file_bytes == 0) return absl::NotFoundError("the weight store is empty");
  if (file_bytes < sizeof(StoreManifest)) {
    return absl::DataLossError("the weight store is shorter than its manifest");
  }
  ASSIGN_OR_RETURN(StoreMapping mapping, StoreMapping::Map(fd, file_bytes, PROT_READ));
  std::memcpy(found, mapping.base(), sizeof(*found));
  RETURN_IF_ERROR(CheckManifest(*found, wanted, file_bytes, mapping.base()));
  return mapping;
}

}  // namespace

WeightStore::WeightStore(const StoreManifest& manifest, SegmentRange owned, const void* base,
                         uint64_t mapped_bytes)
    : manifest_(manifest),
      layouts_(LayoutsOf(manifest)),
      owned_(owned),
      base_(static_cast<const char*>(base)),
      mapped_bytes_(mapped_bytes) {
  const uint32_t first = owned.begin * manifest.quantum;
  const uint32_t end = std::min(owned.end * manifest.quantum, manifest.intermediate);
  width_ = segments() == 0 ? 0 : end - first;
  for (const SlotLayout& slot : layouts_) {
    const uint64_t head = owned.begin == 0 ? slot.head_bytes : 0;
    data_bytes_ += manifest.experts * (head + segments() * slot.segment_bytes);
  }
}

WeightStore::~WeightStore() { munmap(const_cast<char*>(base_), mapped_bytes_); }

absl::StatusOr<std::unique_ptr<WeightStore>> WeightStore::Attach(int fd, const StoreSpec& spec) {
  return AttachPart(fd, spec, spec.segments);
}

absl::StatusOr<std::unique_ptr<WeightStore>> WeightStore::AttachPart(int fd, const StoreSpec& spec,
                                                                     SegmentRange owned) {
  StoreManifest found;
  ASSIGN_OR_RETURN(StoreMapping mapping, MapChecked(fd, spec, &found));
  const bool sealed = IsSealed(fd);
  if (!sealed) RETURN_IF_ERROR(VerifyChecksums(found, owned, mapping.base()));
  if (SharedTransparentAllowed()) madvise(mapping.base(), mapping.bytes(), MADV_HUGEPAGE);
  // Of a part, comparing the checksums has filled its page tables.
  if (owned.size() == found.segments()) mapping.Populate();
  std::unique_ptr<WeightStore> store(
      new WeightStore(found, owned, mapping.base(), mapping.bytes()));
  mapping.Release();
  store->sealed_ = sealed;
  store->page_kind_ = IsHugeTlb(fd) ? PageKind::kHugeTlb : MappedPageKind(store->base_);
  return store;
}

absl::StatusOr<std::unique_ptr<WeightStore>> WeightStore::AttachSealed(int fd,
                                                                       const StoreSpec& spec) {
  // Before anything is read: of a file that can shrink, a read may be a SIGBUS.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (!IsSealed(fd) || (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError("the weight store is not sealed");
  }
  StoreManifest found;
  ASSIGN_OR_RETURN(StoreMapping mapping, MapChecked(fd, spec, &found));
  std::unique_ptr<WeightStore> store(
      new WeightStore(found, spec.segments, mapping.base(), mapping.bytes()));
  mapping.Release();
  store->sealed_ = true;
  return store;
}

absl::Status WeightStore::Check(int fd, const StoreSpec& spec) {
  StoreManifest found;
  return MapChecked(fd, spec, &found).status();
}

absl::Status WeightStore::Fill(int fd, const StoreSpec& spec, HugePages pages,
                               LoadProgress* progress, const Filler& fill) {
  ASSIGN_OR_RETURN(StoreManifest manifest, MakeManifest(spec));
  progress->loaded_bytes.store(0, std::memory_order_relaxed);
  progress->total_bytes.store(manifest.file_bytes - manifest.data_offset,
                              std::memory_order_relaxed);
  if (IsSealed(fd)) {
    return absl::FailedPreconditionError(
        "the weight store is sealed with other contents; a new memfd is needed");
  }
  RETURN_IF_ERROR(Resize(fd, manifest.file_bytes));
  {
    ASSIGN_OR_RETURN(const uint64_t file_bytes, FileBytes(fd));
    ASSIGN_OR_RETURN(StoreMapping mapping,
                     StoreMapping::Map(fd, file_bytes, PROT_READ | PROT_WRITE));
    if (pages != HugePages::kOff) mapping.MakeHugePages(fd);
    auto* head = reinterpret_cast<StoreManifest*>(mapping.base());
    std::memset(head, 0, sizeof(*head));
    RETURN_IF_ERROR(fill(manifest, mapping.base()));
    manifest.checksum = ManifestChecksum(manifest, mapping.base());
    std::memcpy(head, &manifest, sizeof(manifest));
    std::atomic_ref<uint32_t>(head->complete).store(kStoreComplete, std::memory_order_release);
  }
  // No writable mapping of ours is left; a file that cannot be sealed is verified at each attach.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
  if (fcntl(fd, F_GET_SEALS) >= 0 && fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    LogWarn("weight_store_not_sealed", {{"reason", Reason()}});
  }
  return absl::OkStatus();
}

absl::Status WeightStore::Pack(int fd, const StoreSpec& spec, const ExpertSource& source,
                               const LoadOptions& options, LoadProgress* progress) {
  return Fill(fd, spec, options.pages, progress, [&](const StoreManifest& manifest, char* base) {
    return PackExperts(manifest, source, options.threads, progress, base);
  });
}

absl::StatusOr<std::unique_ptr<WeightStore>> WeightStore::Build(int fd, const StoreSpec& spec,
                                                                const ExpertSource& source,
                                                                const LoadOptions& options,
                                                                LoadProgress* progress) {
  RETURN_IF_ERROR(Pack(fd, spec, source, options, progress));
  return Attach(fd, spec);
}

const char* WeightStore::Block(uint32_t layer, uint32_t expert) const {
  const SlotLayout& slot = layout(layer);
  return base_ + slot.offset + expert * slot.block_bytes;
}

const char* WeightStore::Segment(uint32_t layer, uint32_t expert, uint32_t s) const {
  const SlotLayout& slot = layout(layer);
  const uint64_t held = owned_.begin - manifest_.segment_begin + s;
  return Block(layer, expert) + slot.head_bytes + held * slot.segment_bytes;
}

kernels::PackedMatrix WeightStore::GateUp(uint32_t layer, uint32_t expert, uint32_t s) const {
  const SlotLayout& slot = layout(layer);
  kernels::PackedMatrix m{};
  m.group_columns = slot.format.gate_up.group_columns;
  m.data = Segment(layer, expert, s);
  m.n = 2 * segment_width(s);
  m.k = m.k_chunk = manifest_.hidden;
  m.panel_stride_bytes = slot.gate_up_panel_bytes;
  m.chunk_stride_bytes = 0;
  return m;
}

kernels::PackedMatrix WeightStore::Down(uint32_t layer, uint32_t expert) const {
  return DownSegments(layer, expert, 0, segments());
}

kernels::PackedMatrix WeightStore::DownSegments(uint32_t layer, uint32_t expert, uint32_t s,
                                                uint32_t count) const {
  const SlotLayout& slot = layout(layer);
  kernels::PackedMatrix m{};
  m.group_columns = slot.format.down.group_columns;
  m.data = Segment(layer, expert, s) + slot.down_offset;
  m.n = manifest_.hidden;
  m.k = (count - 1) * manifest_.quantum + segment_width(s + count - 1);
  m.k_chunk = manifest_.quantum;
  m.panel_stride_bytes = slot.down_panel_bytes;
  m.chunk_stride_bytes = slot.segment_bytes;
  return m;
}

const float* WeightStore::GateUpBias(uint32_t layer, uint32_t expert, uint32_t s) const {
  if (manifest_.biases == 0) return nullptr;
  return reinterpret_cast<const float*>(Segment(layer, expert, s) + layout(layer).bias_offset);
}

const float* WeightStore::DownBias(uint32_t layer, uint32_t expert) const {
  if (manifest_.biases == 0 || owned_.begin != 0) return nullptr;
  return reinterpret_cast<const float*>(Block(layer, expert));
}

}  // namespace tandem::expert
