#pragma once

// Packed experts on disk: a weight store of all segments (store_manifest.h), written once under
// `<state-dir>/packed/`, from which each worker reads its segments, whatever the number of workers.
// The name holds model hash, formats, quantum and layout version, so that a file that does not fit
// is another file; its manifest is compared all the same.
//
// Reading is a parallel read straight into the store's pages, with each segment's checksum compared
// while it is in the cache. It goes around the page cache where the file is not in it: no second
// copy of the model in memory, and no time to make one.
//
// Writing: under a lock, so that of several workers one packs and the others wait; into a temporary
// file of allocated blocks (a full disk is an error, not a signal), renamed when it is complete.
//
// Thread safety: all from any thread. Errors name the file: NOT_FOUND (no such file), DATA_LOSS
// (torn or corrupt: to be packed again), FAILED_PRECONDITION (another store, or no directory),
// RESOURCE_EXHAUSTED (disk), CANCELLED.

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/weight_store.h"

namespace tandem::expert {

// `spec` with all segments: what the file of a worker's spec holds.
StoreSpec WholeSpec(StoreSpec spec);

class PackedFile {
 public:
  // Of a worker's spec.
  static std::string PathFor(const std::string& state_dir, const StoreSpec& spec);

  static absl::StatusOr<PackedFile> Open(const std::string& path, const StoreSpec& spec);
  // Opens it, after packing it (again) where it is missing, torn or another store.
  static absl::StatusOr<PackedFile> OpenOrPack(const std::string& path, const StoreSpec& spec,
                                               const ExpertSource& source, int threads,
                                               LoadProgress* progress);

  // For packing that nobody asked for: RESOURCE_EXHAUSTED unless the file exists or leaves as much
  // room on its disk as it takes.
  static absl::Status CheckRoom(const std::string& path, const StoreSpec& spec);

  // Fills the store `fd` (a memfd or an empty file) with the segments of `spec`, seals and maps it.
  absl::StatusOr<std::unique_ptr<WeightStore>> Load(int fd, const StoreSpec& spec,
                                                    const LoadOptions& options,
                                                    LoadProgress* progress) const;
  // Maps the segments of `spec` as they lie on disk, after comparing their checksums.
  absl::StatusOr<std::unique_ptr<WeightStore>> Map(const StoreSpec& spec) const;
  // Makes the next OpenOrPack pack again.
  void Discard() const;

  const std::string& path() const { return path_; }

 private:
  PackedFile(std::string path, shm::UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  std::string path_;
  shm::UniqueFd fd_;
};

}  // namespace tandem::expert
