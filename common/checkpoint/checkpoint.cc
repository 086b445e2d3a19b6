#include "common/checkpoint/checkpoint.h"

#include <simdjson.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

constexpr size_t kMaxIndexBytes = 256u << 20;  // 671B parameters in 91,000 tensors make 9 MB
constexpr size_t kMaxIndexDepth = 8;
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

// Tensor name -> shard file name, both owned by `parser`.
absl::Status ParseIndex(const std::string& path, simdjson::dom::parser& parser,
                        std::vector<std::pair<std::string_view, std::string_view>>& out) {
  std::error_code size_error;
  const uintmax_t bytes = std::filesystem::file_size(path, size_error);
  if (!size_error && bytes > kMaxIndexBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", bytes, " bytes, the limit is ", kMaxIndexBytes));
  }
  simdjson::padded_string json;
  simdjson::error_code error = simdjson::padded_string::load(path).get(json);
  if (!error) error = parser.allocate(json.size(), kMaxIndexDepth);
  simdjson::dom::element root;
  if (!error) error = parser.parse(json).get(root);
  simdjson::dom::object map;
  if (!error) error = root["weight_map"].get(map);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": no JSON object with a weight_map: ", simdjson::error_message(error)));
  }
  for (simdjson::dom::key_value_pair field : map) {
    std::string_view shard;
    // Shards lie beside the index: a separator could lead out of the directory.
    if (field.value.get(shard) || shard.empty() || shard.find('/') != std::string_view::npos ||
        shard.find('\0') != std::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": weight_map of tensor ", QuoteForMessage(field.key), " is not a file name"));
    }
    out.emplace_back(field.key, shard);
  }
  if (out.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map is empty"));
  return absl::OkStatus();
}

}  // namespace

std::string ShapeText(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) absl::StrAppend(&text, i == 0 ? "" : ",", view.shape[i]);
  return text + "]";
}

absl::Status TensorError(const Checkpoint::Tensor& tensor, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(tensor.file), ": tensor ",
                                                 QuoteForMessage(tensor.name), ": ",
                                                 std::string(what)));
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->dir_ = path;
  const std::filesystem::path root(path);
  std::error_code error;
  ASSIGN_OR_RETURN(const std::optional<std::string> gguf, FindGguf(path));
  if (gguf) {
    RETURN_IF_ERROR(checkpoint->OpenGguf(*gguf));
  } else if (std::filesystem::exists(root / kSingleFile, error)) {
    RETURN_IF_ERROR(checkpoint->AddFile(root / kSingleFile));
  } else if (std::filesystem::exists(root / kIndexFile, error)) {
    RETURN_IF_ERROR(checkpoint->OpenShards(root / kIndexFile));
  } else {
    return absl::NotFoundError(absl::StrCat(path, ": holds neither ", kSingleFile, " nor ",
                                            kIndexFile, " nor a .gguf file"));
  }
  return checkpoint;
}

absl::Status Checkpoint::OpenGguf(const std::string& path) {
  ASSIGN_OR_RETURN(gguf_, GgufModel::Open(path));
  ASSIGN_OR_RETURN(gguf_names_, TranslateTensors(*gguf_));
  tensors_.reserve(gguf_names_.size());
  for (const HubTensor& hub : gguf_names_) RETURN_IF_ERROR(AddGgufTensor(hub));
  return absl::OkStatus();
}

absl::Status Checkpoint::AddGgufTensor(const HubTensor& hub) {
  const GgufTensor& from = *hub.tensor;
  Tensor tensor;
  tensor.name = hub.name;
  tensor.file = from.file;
  tensor.gguf = &from;
  tensor.gguf_first_row = hub.first_row;
  tensor.gguf_paired_rows = hub.paired_rows;
  const uint64_t skipped = static_cast<uint64_t>(hub.first_row) * from.row_bytes();
  tensor.offset = from.offset + skipped;
  tensor.view.rank = hub.rank;
  tensor.view.shape = {hub.rows, from.row_elements()};
  if (hub.rank == 1) tensor.view.shape = {from.row_elements()};
  tensor.view.dtype = GgufElementType(*from.type).value_or(DType::kU8);
  if (from.type->block_elements == 1) {
    tensor.view.data = const_cast<uint8_t*>(from.data + skipped);  // read-only pages
  }
  if (hub.rank == 1 && hub.paired_rows != 0) {
    const size_t element = from.type->block_bytes;
    std::vector<uint8_t>& copy = reordered_.emplace_back(from.bytes);
    for (int64_t i = 0; i < from.row_elements(); ++i) {
      const auto at = static_cast<size_t>(PairedRow(i, hub.paired_rows));
      std::copy_n(from.data + at * element, element,
                  copy.data() + static_cast<size_t>(i) * element);
    }
    tensor.view.data = copy.data();
  }
  if (tensors_.emplace(tensor.name, tensor).second) return absl::OkStatus();
  return TensorError(tensor, absl::StrCat("is there twice; one is ", QuoteForMessage(from.name)));
}

absl::Status Checkpoint::AddFile(const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  for (const SafetensorsEntry& entry : file->entries()) {
    const Tensor tensor{entry.name, file->View(entry), file->path(), entry.begin};
    const auto [other, inserted] = tensors_.emplace(tensor.name, tensor);
    if (!inserted) {
      return TensorError(tensor, absl::StrCat("is also in ", std::string(other->second.file)));
    }
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenShards(const std::string& index_path) {
  simdjson::dom::parser parser;
  std::vector<std::pair<std::string_view, std::string_view>> weight_map;
  RETURN_IF_ERROR(ParseIndex(index_path, parser, weight_map));
  std::map<std::string_view, std::string_view> first_tensor;  // of each shard, in name order
  for (const auto& [tensor, shard] : weight_map) first_tensor.emplace(shard, tensor);
  for (const auto& [shard, tensor] : first_tensor) {
    const std::filesystem::path path = std::filesystem::path(dir_) / std::string(shard);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      return absl::NotFoundError(absl::StrCat(index_path, ": names ", path.string(),
                                              ", which is missing; tensor ",
                                              QuoteForMessage(tensor), " should be in it"));
    }
    RETURN_IF_ERROR(AddFile(path));
  }
  for (const auto& [name, shard] : weight_map) {
    const Tensor* tensor = Find(name);
    const std::string path = std::filesystem::path(dir_) / std::string(shard);
    if (tensor == nullptr || tensor->file != path) {
      return absl::NotFoundError(absl::StrCat(index_path, ": puts tensor ", QuoteForMessage(name),
                                              " into ", path, ", which does not hold it"));
    }
  }
  return absl::OkStatus();
}

const Checkpoint::Tensor* Checkpoint::Find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

absl::StatusOr<const Checkpoint::Tensor*> Checkpoint::Get(std::string_view name) const {
  if (const Tensor* tensor = Find(name)) return tensor;
  return absl::NotFoundError(absl::StrCat(dir_, ": tensor ", QuoteForMessage(name), " is missing"));
}

absl::StatusOr<const Checkpoint::Tensor*> Checkpoint::Get(std::string_view name,
                                                          std::span<const int64_t> shape) const {
  ASSIGN_OR_RETURN(const Tensor* tensor, Get(name));
  TensorView want;
  want.rank = static_cast<int>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) want.shape.at(i) = shape[i];
  if (tensor->view.rank != want.rank || tensor->view.shape != want.shape) {
    return TensorError(*tensor, absl::StrCat("shape is ", ShapeText(tensor->view), ", expected ",
                                             ShapeText(want)));
  }
  return tensor;
}

absl::Status Checkpoint::ReadF32(std::string_view name, std::span<float> out) const {
  ASSIGN_OR_RETURN(const Tensor* tensor, Get(name));
  const DType dtype = tensor->view.dtype;
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    return TensorError(*tensor, absl::StrCat("dtype is ", std::string(DTypeName(dtype)),
                                             ", expected F32, F16 or BF16"));
  }
  if (out.size() != static_cast<size_t>(tensor->view.Elements())) {
    return TensorError(*tensor, absl::StrCat("shape is ", ShapeText(tensor->view), ", expected ",
                                             out.size(), " elements"));
  }
  const int64_t count = tensor->view.Elements();
  ConvertToF32(dtype, tensor->view.data, count, out.data());
  if (const auto bad = FindNonFinite(out.data(), count)) {
    return TensorError(*tensor, absl::StrCat("element ", *bad, " is not a finite number"));
  }
  return absl::OkStatus();
}

}  // namespace tandem
