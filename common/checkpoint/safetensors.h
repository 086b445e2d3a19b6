#pragma once

// The safetensors container: an 8-byte little-endian header length, a JSON header that maps tensor
// names to {dtype, shape, data_offsets}, then the tensor data. A file is untrusted: every length,
// dtype, shape and offset is checked before anything points into it.
//
// What is refused: a header beyond 100 MB or beyond the file, JSON that is malformed or nested
// deeper than the format needs, unknown or repeated keys, empty or repeated names, dtypes that this
// engine does not know, shapes whose size overflows or disagrees with data_offsets, tensors that
// overlap or leave holes, and a file whose size is not exactly what the header says.
//
// Thread safety: a SafetensorsFile is immutable after Open; any thread may read it.
// Ownership: the file owns its mapping; TensorViews point into it and must not outlive it. Their
// data is read-only and may be unaligned (old writers do not pad the header).
// Errors: every Status names the file and, where there is one, the tensor.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/mapped_file.h"
#include "common/tensor/dtype.h"
#include "common/tensor/tensor_view.h"

namespace tandem {

// The format's own bound on the JSON header (safetensors 0.4: 100 MB).
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // offsets in the file, not in the data section; begin <= end <= file size
  uint64_t end = 0;
};

// Parses the first bytes of a file that is `file_bytes` long. `prefix` holds the whole file or at
// least its header. Entries come back in order of their offsets. `file` is used in messages only.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::string_view file,
                                                                     std::string_view prefix,
                                                                     uint64_t file_bytes);

class SafetensorsFile {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);

  const std::string& path() const { return mapped_.path(); }
  uint64_t file_bytes() const { return mapped_.bytes(); }
  int64_t mtime_ns() const { return mapped_.mtime_ns(); }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  TensorView View(const SafetensorsEntry& entry) const;

 private:
  explicit SafetensorsFile(MappedFile mapped) : mapped_(std::move(mapped)) {}

  MappedFile mapped_;
  std::vector<SafetensorsEntry> entries_;
};

}  // namespace tandem
