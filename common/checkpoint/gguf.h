#pragma once

// The GGUF container (versions 2 and 3, little-endian): a header, key/values, tensor descriptions,
// then tensor data at aligned offsets; a large model is cut into files NAME-00001-of-0000N.gguf.
// A file is untrusted: every length, count, type, dimension, offset and name is checked before
// anything points into it.
//
// What is refused: other versions and byte orders, counts and lengths beyond the file, empty, long
// or repeated keys and names, unknown value types, booleans that are neither 0 nor 1, an alignment
// that is not a power of two, more than 4 dimensions or one that is 0, sizes that overflow, rows
// that are not whole blocks, unknown block types (by name where they have one), offsets that are
// unaligned or beyond the file, tensors that overlap; of a set of files, a missing or misplaced
// one.
//
// Thread safety: immutable after Open; any thread may read. Ownership: the model owns its mappings;
// all views (strings, arrays, tensor data) point into them and must not outlive it.
// Errors: every Status names the file and, where there is one, the key or the tensor.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/mapped_file.h"
#include "common/tensor/dtype.h"

namespace tandem {

// Block types by their number in the file.
enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2K = 10,
  kQ3K = 11,
  kQ4K = 12,
  kQ5K = 13,
  kQ6K = 14,
  kIq4Nl = 20,
  kIq4Xs = 23,
  kBf16 = 30,
  kMxfp4 = 39,
  kNvfp4 = 40,
};

struct GgufTypeInfo {
  GgufType type;
  const char* name;
  uint32_t block_elements;  // a row is a whole number of blocks
  uint32_t block_bytes;
};

// Null for a type that is not supported.
const GgufTypeInfo* FindGgufType(uint32_t number);
// The name of any known type, supported or not; empty for an unknown number.
std::string_view GgufTypeName(uint32_t number);

// The element type of a plain type; nullopt for block types.
std::optional<DType> GgufElementType(const GgufTypeInfo& type);

struct GgufTensor {
  static constexpr int kMaxRank = 4;

  std::string_view name;
  const GgufTypeInfo* type = nullptr;
  int rank = 0;
  // Row-major, slowest first (the file lists them fastest first): [rows, row elements] or
  // [experts, rows, row elements].
  std::array<int64_t, kMaxRank> shape = {};
  uint64_t offset = 0;  // of its first byte in its file
  uint64_t bytes = 0;
  const uint8_t* data = nullptr;
  std::string_view file;  // path of the file that holds it

  int64_t row_elements() const { return shape[rank - 1]; }
  uint64_t row_bytes() const {
    return static_cast<uint64_t>(row_elements()) / type->block_elements * type->block_bytes;
  }
};

enum class GgufKind : uint8_t { kUnsigned, kSigned, kReal, kBool, kString, kArray };

// One value. Numbers are widened to 64 bits; arrays keep their elements (arrays of arrays, which no
// known key uses, are checked and dropped).
struct GgufValue {
  GgufKind kind = GgufKind::kUnsigned;
  uint64_t unsigned_value = 0;
  int64_t signed_value = 0;
  double real = 0;
  bool boolean = false;
  std::string_view string;
  GgufKind element_kind = GgufKind::kUnsigned;  // of an array
  std::vector<std::string_view> strings;
  std::vector<int64_t> integers;  // booleans as 0 and 1
  std::vector<double> reals;
};

struct GgufContents {
  uint32_t version = 0;
  std::unordered_map<std::string_view, GgufValue> values;
  std::vector<GgufTensor> tensors;  // in order of their offsets
};

// Parses a whole file's bytes, which the result points into. `file` is the path in messages and of
// the tensors; it must outlive the result.
absl::StatusOr<GgufContents> ParseGguf(std::string_view file, std::string_view bytes);

// A model in one GGUF file or a set of them.
class GgufModel {
 public:
  struct File {
    std::unique_ptr<MappedFile> mapped;
    GgufContents contents;
  };

  // `path` is a file, the first one of a set.
  static absl::StatusOr<std::unique_ptr<GgufModel>> Open(const std::string& path);

  const std::string& path() const { return files_.front().mapped->path(); }
  const std::vector<File>& files() const { return files_; }
  // Of all files, in the files' order.
  const std::vector<const GgufTensor*>& tensors() const { return tensors_; }
  const GgufTensor* FindTensor(std::string_view name) const;  // null: there is none

  // Null when the (first) file has no such key.
  const GgufValue* Find(std::string_view key) const;
  // An error naming file and key when the value is of another kind; nullopt when it is absent.
  // Integers of either signedness are accepted as such, and as reals.
  absl::StatusOr<std::optional<int64_t>> Int(std::string_view key) const;
  absl::StatusOr<std::optional<double>> Real(std::string_view key) const;
  absl::StatusOr<std::optional<bool>> Bool(std::string_view key) const;
  absl::StatusOr<std::optional<std::string_view>> String(std::string_view key) const;
  // Null when absent.
  absl::StatusOr<const std::vector<std::string_view>*> Strings(std::string_view key) const;
  absl::StatusOr<const std::vector<int64_t>*> Ints(std::string_view key) const;

  // "file: key 'key': what".
  absl::Status KeyError(std::string_view key, std::string_view what) const;

 private:
  GgufModel() = default;
  absl::Status AddFile(const std::string& path);
  absl::Status AddSplits();
  absl::Status CheckSplit(int64_t index, int64_t count) const;

  std::vector<File> files_;
  std::vector<const GgufTensor*> tensors_;
  std::unordered_map<std::string_view, const GgufTensor*> by_name_;
};

// The GGUF file that `path` leads to: itself when it ends in .gguf, or the only one (the first of
// the only set) of a directory without safetensors. nullopt: there is none; an error naming two
// where there are several.
absl::StatusOr<std::optional<std::string>> FindGguf(const std::string& path);

// The path of file `index` (from 0) of `count`, or nullopt when `path` is not named so.
std::optional<std::string> GgufSplitPath(std::string_view path, int64_t index, int64_t count);

}  // namespace tandem
