#include "expert_worker/engine/packed_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "expert_worker/engine/store_reader.h"

namespace tandem::expert {
namespace {

std::string Reason() { return std::strerror(errno); }

absl::Status Named(const absl::Status& status, const std::string& path) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(path, ": ", std::string(status.message())));
}

// An exclusive lock beside the file, held until destruction.
class FileLock {
 public:
  static absl::StatusOr<FileLock> Take(const std::string& path, const LoadProgress& progress) {
    const std::string lock_path = path + ".lock";
    shm::UniqueFd fd(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd.valid()) {
      return absl::FailedPreconditionError(absl::StrCat(lock_path, ": ", Reason()));
    }
    for (bool said = false; flock(fd.get(), LOCK_EX | LOCK_NB) != 0; said = true) {
      if (errno != EWOULDBLOCK && errno != EINTR) {
        return absl::FailedPreconditionError(absl::StrCat(lock_path, ": ", Reason()));
      }
      if (!said) LogInfo("waiting_for_packing", {{"file", path}});
      if (progress.cancel.load(std::memory_order_relaxed)) {
        return absl::CancelledError("loading was cancelled");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return FileLock(std::move(fd));
  }

 private:
  explicit FileLock(shm::UniqueFd fd) : fd_(std::move(fd)) {}
  shm::UniqueFd fd_;
};

absl::Status MakeDirectoryOf(const std::string& path) {
  std::error_code error;
  const std::filesystem::path dir = std::filesystem::path(path).parent_path();
  std::filesystem::create_directories(dir, error);
  if (!error) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(dir.string(), ": ", error.message()));
}

// Packs into a temporary file and gives it its name.
absl::Status Write(const std::string& path, const StoreSpec& whole, const ExpertSource& source,
                   int threads, LoadProgress* progress) {
  ASSIGN_OR_RETURN(const StoreManifest manifest, MakeManifest(whole));
  const std::string temporary = path + ".part";
  unlink(temporary.c_str());  // of a process that died; we hold the lock
  const shm::UniqueFd fd(open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.valid()) return absl::FailedPreconditionError(absl::StrCat(temporary, ": ", Reason()));
  absl::Status status;
  if (const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(manifest.file_bytes));
      error != 0) {
    status = absl::ResourceExhaustedError(
        absl::StrCat(temporary, ": ", manifest.file_bytes, " bytes: ", std::strerror(error)));
  }
  if (status.ok()) {
    status = Named(WeightStore::Pack(fd.get(), whole, source, {.threads = threads}, progress),
                   temporary);
  }
  if (status.ok() && (fsync(fd.get()) != 0 || rename(temporary.c_str(), path.c_str()) != 0)) {
    status = absl::ResourceExhaustedError(absl::StrCat(path, ": ", Reason()));
  }
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

bool IsWorthPacking(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsDataLoss(status) || absl::IsFailedPrecondition(status);
}

}  // namespace

StoreSpec WholeSpec(StoreSpec spec) {
  spec.segments = {0, SegmentCount(spec.intermediate, spec.quantum)};
  return spec;
}

std::string PackedFile::PathFor(const std::string& state_dir, const StoreSpec& spec) {
  const auto manifest = MakeManifest(WholeSpec(spec));
  // A spec that has no manifest is refused when the file is opened.
  const uint64_t identity =
      manifest.ok() ? StoreChecksum(&*manifest, offsetof(StoreManifest, checksum), 0) : 0;
  return absl::StrFormat("%s/packed/experts-%016x-%016x.store", state_dir, spec.model_hash,
                         identity);
}

absl::StatusOr<PackedFile> PackedFile::Open(const std::string& path, const StoreSpec& spec) {
  shm::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) {
    return errno == ENOENT ? absl::NotFoundError(absl::StrCat(path, ": no such file"))
                           : absl::FailedPreconditionError(absl::StrCat(path, ": ", Reason()));
  }
  RETURN_IF_ERROR(Named(WeightStore::Check(fd.get(), WholeSpec(spec)), path));
  return PackedFile(path, std::move(fd));
}

absl::StatusOr<PackedFile> PackedFile::OpenOrPack(const std::string& path, const StoreSpec& spec,
                                                  const ExpertSource& source, int threads,
                                                  LoadProgress* progress) {
  RETURN_IF_ERROR(MakeDirectoryOf(path));
  ASSIGN_OR_RETURN(const FileLock lock, FileLock::Take(path, *progress));
  auto file = Open(path, spec);
  if (file.ok() || !IsWorthPacking(file.status())) return file;
  if (!absl::IsNotFound(file.status())) {
    LogWarn("packed_file_refused", {{"reason", file.status().ToString()}});
  }
  LogInfo("packing", {{"file", path}});
  RETURN_IF_ERROR(Write(path, WholeSpec(spec), source, threads, progress));
  return Open(path, spec);
}

absl::Status PackedFile::CheckRoom(const std::string& path, const StoreSpec& spec) {
  RETURN_IF_ERROR(MakeDirectoryOf(path));
  ASSIGN_OR_RETURN(const StoreManifest manifest, MakeManifest(WholeSpec(spec)));
  std::error_code error;
  if (std::filesystem::exists(path, error)) return absl::OkStatus();
  const auto space = std::filesystem::space(std::filesystem::path(path).parent_path(), error);
  if (!error && space.available / 2 >= manifest.file_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      path, " would take ", manifest.file_bytes, " of the disk's ", error ? 0 : space.available,
      " free bytes; `tandem pack` writes it all the same"));
}

absl::StatusOr<std::unique_ptr<WeightStore>> PackedFile::Load(int fd, const StoreSpec& spec,
                                                              const LoadOptions& options,
                                                              LoadProgress* progress) const {
  ASSIGN_OR_RETURN(const StoreManifest from, MakeManifest(WholeSpec(spec)));
  const auto fill = [&](const StoreManifest& to, char* base) {
    return Named(ReadStore({path_, fd_.get(), from, fd, to}, options.threads, progress, base),
                 path_);
  };
  RETURN_IF_ERROR(WeightStore::Fill(fd, spec, options.pages, progress, fill));
  return WeightStore::Attach(fd, spec);
}

absl::StatusOr<std::unique_ptr<WeightStore>> PackedFile::Map(const StoreSpec& spec) const {
  auto store = WeightStore::AttachPart(fd_.get(), WholeSpec(spec), spec.segments);
  if (!store.ok()) return Named(store.status(), path_);
  return store;
}

void PackedFile::Discard() const { unlink(path_.c_str()); }

}  // namespace tandem::expert
