#include "expert_worker/engine/store_reader.h"

#include <fcntl.h>
#include <oneapi/tbb/enumerable_thread_specific.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/hw/pages.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/first_error.h"

namespace tandem::expert {
namespace {

// A read: large enough for a disk's full speed, small enough to be checked while in the L2 cache.
constexpr uint64_t kReadBytes = uint64_t{1} << 20;

// Consecutive held segments [begin, end) of an expert's block.
struct Piece {
  uint32_t slot;
  uint32_t expert;
  uint32_t begin;
  uint32_t end;
};

absl::Status ReadFully(int fd, char* out, uint64_t bytes, uint64_t offset) {
  while (bytes != 0) {
    const ssize_t got = pread(fd, out, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return absl::DataLossError(
          absl::StrCat("cannot read at ", offset, ": ", std::strerror(errno)));
    }
    if (got == 0) return absl::DataLossError(absl::StrCat("ends at ", offset));
    out += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

// Whether any of a few places is not in the page cache. Unknown counts as cached.
bool IsColdFile(int fd, uint64_t bytes) {
  for (uint64_t i = 0; i < 8; ++i) {
    char byte = 0;
    iovec to{&byte, 1};
    const auto offset = static_cast<off_t>(bytes / 8 * i);
    if (preadv2(fd, &to, 1, offset, RWF_NOWAIT) < 0 && errno == EAGAIN) return true;
  }
  return false;
}

absl::Status WriteFully(int fd, const char* data, uint64_t bytes, uint64_t offset) {
  while (bytes != 0) {
    const ssize_t put = pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot write the weight store: ", std::strerror(errno)));
    }
    data += put;
    offset += static_cast<uint64_t>(put);
    bytes -= static_cast<uint64_t>(put);
  }
  return absl::OkStatus();
}

class Reader {
 public:
  Reader(const StoreCopy& copy, char* base)
      : fd_(copy.fd),
        store_fd_(IsWritten(copy.store_fd, base) ? copy.store_fd : -1),
        from_(copy.from),
        to_(copy.to),
        base_(base),
        from_layouts_(LayoutsOf(copy.from)),
        to_layouts_(LayoutsOf(copy.to)) {}

  absl::Status ReadChecksums() {
    table_.resize(from_.checksums());
    RETURN_IF_ERROR(ReadFully(fd_, reinterpret_cast<char*>(table_.data()),
                              table_.size() * sizeof(uint64_t), sizeof(StoreManifest)));
    return absl::OkStatus();
  }

  std::vector<Piece> Pieces() const {
    std::vector<Piece> pieces;
    for (uint32_t slot = 0; slot < to_.slots; ++slot) {
      const uint64_t fit = kReadBytes / to_layouts_[slot].segment_bytes;
      const auto step = static_cast<uint32_t>(std::max<uint64_t>(fit, 1));
      for (uint32_t expert = 0; expert < to_.experts; ++expert) {
        for (uint32_t s = 0; s < to_.segments(); s += step) {
          pieces.push_back({slot, expert, s, std::min(s + step, to_.segments())});
        }
      }
    }
    return pieces;
  }

  // Reads with `fd`, which may be another descriptor of the same file, by way of `buffer`.
  absl::Status Read(int fd, const Piece& piece, PageBuffer& buffer, LoadProgress* progress) const {
    const SlotLayout& to = to_layouts_[piece.slot];
    const SlotLayout& from = from_layouts_[piece.slot];
    const uint64_t begin = piece.begin == 0 ? 0 : to.head_bytes + piece.begin * to.segment_bytes;
    const uint64_t end = to.head_bytes + piece.end * to.segment_bytes;
    // A store that begins at segment 0 has the head, like the file; others begin behind it.
    const uint64_t skipped =
        to_.segment_begin == 0 ? 0 : from.head_bytes + to_.segment_begin * from.segment_bytes;
    const uint64_t target = to.offset + piece.expert * to.block_bytes + begin;
    char* data = base_ + target;
    if (store_fd_ >= 0) {
      if (buffer.bytes() < end - begin) {
        ASSIGN_OR_RETURN(buffer, PageBuffer::Allocate(end - begin, HugePages::kOff));
      }
      data = static_cast<char*>(buffer.data());
    }
    RETURN_IF_ERROR(ReadFully(fd, data, end - begin,
                              from.offset + piece.expert * from.block_bytes + skipped + begin));
    RETURN_IF_ERROR(CheckAndCopyChecksums(piece, data));
    if (store_fd_ >= 0) RETURN_IF_ERROR(WriteFully(store_fd_, data, end - begin, target));
    progress->loaded_bytes.fetch_add(end - begin, std::memory_order_relaxed);
    return absl::OkStatus();
  }

 private:
  // Whether a store is better written than mapped. Plain pages are: reading into a fresh mapping
  // takes a fault and zeroes each page first, and unmapping takes as long again. Huge pages have
  // few faults, and explicit ones cannot be written.
  static bool IsWritten(int store_fd, const char* base) {
    return !IsHugeTlb(store_fd) && !SharedTransparentAllowed() &&
           MappedPageKind(base) == PageKind::kPlain;
  }

  // `data` begins with the piece.
  absl::Status CheckAndCopyChecksums(const Piece& piece, const char* data) const {
    const SlotLayout& to = to_layouts_[piece.slot];
    const uint64_t block = uint64_t{piece.slot} * to_.experts + piece.expert;
    auto* table = reinterpret_cast<uint64_t*>(base_ + sizeof(StoreManifest));
    for (uint32_t s = piece.begin; s < piece.end; ++s) {
      const uint64_t bytes = (s == 0 ? to.head_bytes : 0) + to.segment_bytes;
      const uint32_t segment = to_.segment_begin + s;
      const uint64_t sum =
          StoreChecksum(data, bytes, ChecksumSeed(piece.slot, piece.expert, segment));
      data += bytes;
      if (sum != table_[block * from_.segments() + segment]) {
        return absl::DataLossError(absl::StrCat("packed weights of expert layer ", piece.slot,
                                                ", expert ", piece.expert, ", segment ", segment,
                                                " do not match their checksum"));
      }
      table[block * to_.segments() + s] = sum;
    }
    return absl::OkStatus();
  }

  const int fd_;
  const int store_fd_;  // -1: the store is filled through its mapping
  const StoreManifest& from_;
  const StoreManifest& to_;
  char* const base_;
  const std::vector<SlotLayout> from_layouts_;
  const std::vector<SlotLayout> to_layouts_;
  std::vector<uint64_t> table_;
};

}  // namespace

absl::Status ReadStore(const StoreCopy& copy, int threads, LoadProgress* progress, char* base) {
  Reader reader(copy, base);
  RETURN_IF_ERROR(reader.ReadChecksums());
  shm::UniqueFd direct;
  if (IsColdFile(copy.fd, copy.from.file_bytes)) {
    // Refused by some file systems; then the page cache it is.
    direct = shm::UniqueFd(open(copy.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
  }
  const int data_fd = direct.valid() ? direct.get() : copy.fd;
  const std::vector<Piece> pieces = reader.Pieces();
  oneapi::tbb::enumerable_thread_specific<PageBuffer> buffers;
  FirstError error;
  oneapi::tbb::task_arena arena(threads);
  arena.execute([&] {
    oneapi::tbb::parallel_for(size_t{0}, pieces.size(), [&](size_t i) {
      if (error.any()) return;
      if (progress->cancel.load(std::memory_order_relaxed)) {
        error.Set(absl::CancelledError("loading was cancelled"));
        return;
      }
      const absl::Status status = reader.Read(data_fd, pieces[i], buffers.local(), progress);
      if (!status.ok()) error.Set(status);
    });
  });
  return error.Take();
}

}  // namespace tandem::expert
