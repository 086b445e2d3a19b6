#pragma once

// Writes one safetensors file whose tensors are known beforehand: the header first, then any part
// of any tensor in any order. Readers of the hub require the metadata {"format": "pt"}.
//
//   ASSIGN_OR_RETURN(auto writer, SafetensorsWriter::Create(path, std::move(tensors)));
//   RETURN_IF_ERROR(writer->Write(0, 0, bytes));
//   RETURN_IF_ERROR(writer->Finish());
//
// Thread safety: Write may be called concurrently. Ownership: owns the file descriptor; a file that
// was not finished stays behind for its directory's owner to remove. Errors: name the file; the
// space is reserved by Create, so a full disk shows there.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/tensor/dtype.h"

namespace tandem {

struct TensorToWrite {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  uint64_t Bytes() const;
};

// Length, JSON and padding; the data begin at a multiple of 8.
std::string SafetensorsHeader(const std::vector<TensorToWrite>& tensors);

class SafetensorsWriter {
 public:
  // The file must not exist.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, std::vector<TensorToWrite> tensors);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  const std::string& path() const { return path_; }
  // Writes `bytes` at `offset` of tensor `index`. REQUIRES: they lie inside of it.
  absl::Status Write(size_t index, uint64_t offset, std::string_view bytes);
  // Flushes to the disk and closes.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status WriteAt(uint64_t offset, std::string_view bytes);
  absl::Status Error(std::string_view what) const;

  std::string path_;
  int fd_ = -1;
  std::vector<uint64_t> begins_;  // of each tensor in the file, and the file's size
};

}  // namespace tandem
