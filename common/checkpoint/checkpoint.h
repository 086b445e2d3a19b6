#pragma once

// A model's weights, opened as one set of named tensors over memory maps: `model.safetensors` of a
// directory, or the shards that `model.safetensors.index.json` names, or a GGUF file (the first of
// a set), given itself or as the only one of a directory. Tensors of a GGUF file have the names
// that the hub's checkpoint of the model gives them (gguf_names.h).
//
// Thread safety: immutable after Open; any thread may read it.
// Ownership: a Checkpoint owns its mappings; every view into it must not outlive it.
// Errors: a missing shard, a tensor that the index puts where it is not, and a tensor name held by
// two files are refused by Open. Every message names file and tensor.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/gguf.h"
#include "common/checkpoint/gguf_names.h"
#include "common/checkpoint/safetensors.h"
#include "common/tensor/tensor_view.h"

namespace tandem {

// A half-open range of rows or columns.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

class Checkpoint {
 public:
  struct Tensor {
    std::string_view name;
    TensorView view;        // may be unaligned
    std::string_view file;  // path of the file that holds it
    uint64_t offset = 0;    // of its first byte in that file
    // Of a GGUF file: the matrix lies in this tensor from this row on, its rows ordered as
    // PairedRow says. Block types have view.dtype U8, and their views no data: OpenGgufMatrix reads
    // them.
    const GgufTensor* gguf = nullptr;
    int64_t gguf_first_row = 0;
    int64_t gguf_paired_rows = 0;
  };

  // `path`: a directory or a GGUF file.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);

  // As given to Open.
  const std::string& dir() const { return dir_; }
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  const GgufModel* gguf() const { return gguf_.get(); }  // null: safetensors
  size_t tensor_count() const { return tensors_.size(); }

  // Null when there is no such tensor.
  const Tensor* Find(std::string_view name) const;
  // As Find, but an error naming the tensor and the directory.
  absl::StatusOr<const Tensor*> Get(std::string_view name) const;
  // As Get, and the shape must be exactly `shape`.
  absl::StatusOr<const Tensor*> Get(std::string_view name, std::span<const int64_t> shape) const;

  // Reads a whole F32, F16 or BF16 tensor as F32 (parts of matrices: WeightMatrix). REQUIRES of
  // the caller: `out` holds exactly its elements, else an error. NaN and infinities are refused: no
  // weight is either.
  absl::Status ReadF32(std::string_view name, std::span<float> out) const;

 private:
  Checkpoint() = default;
  absl::Status AddFile(const std::string& path);
  absl::Status OpenShards(const std::string& index_path);
  absl::Status OpenGguf(const std::string& path);
  absl::Status AddGgufTensor(const HubTensor& hub);

  std::string dir_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unique_ptr<GgufModel> gguf_;
  std::vector<HubTensor> gguf_names_;
  std::vector<std::vector<uint8_t>> reordered_;  // vectors whose elements the file holds in pairs
  std::unordered_map<std::string_view, Tensor> tensors_;
};

// "[2,3]".
std::string ShapeText(const TensorView& view);

// "file: tensor 'name': what", the form of every error about a tensor.
absl::Status TensorError(const Checkpoint::Tensor& tensor, std::string_view what);

}  // namespace tandem
