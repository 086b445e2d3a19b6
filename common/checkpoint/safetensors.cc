#include "common/checkpoint/safetensors.h"

#include <simdjson.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

constexpr size_t kLengthBytes = 8;
// {"name": {"shape": [n]}} is three levels; a few more leave room for metadata of other writers.
constexpr size_t kMaxJsonDepth = 8;
constexpr size_t kMaxNameBytes = 1024;

class HeaderParser {
 public:
  HeaderParser(std::string_view file, uint64_t file_bytes, uint64_t header_bytes)
      : file_(file), data_begin_(kLengthBytes + header_bytes), file_bytes_(file_bytes) {}

  absl::StatusOr<std::vector<SafetensorsEntry>> Parse(std::string_view json);

 private:
  absl::Status Error(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(file_, ": ", std::string(what)));
  }
  absl::Status TensorError(std::string_view name, std::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(file_, ": tensor ", QuoteForMessage(name), ": ", std::string(what)));
  }

  absl::Status AddTensor(std::string_view name, simdjson::dom::element value);
  absl::Status ParseShape(simdjson::dom::element value, SafetensorsEntry& entry) const;
  absl::Status ParseOffsets(simdjson::dom::element value, SafetensorsEntry& entry) const;
  absl::Status CheckBytes(const SafetensorsEntry& entry) const;
  absl::Status CheckLayout();

  const std::string file_;
  const uint64_t data_begin_;
  const uint64_t file_bytes_;
  std::vector<SafetensorsEntry> entries_;
};

absl::StatusOr<std::vector<SafetensorsEntry>> HeaderParser::Parse(std::string_view json) {
  if (json.empty() || json.front() != '{') return Error("the header does not start with '{'");
  simdjson::dom::parser parser;
  simdjson::padded_string padded(json);
  simdjson::error_code error = parser.allocate(json.size(), kMaxJsonDepth);
  simdjson::dom::object root;
  if (!error) error = parser.parse(padded).get(root);
  if (error) {
    return Error(absl::StrCat("the header is not the JSON object of the safetensors format: ",
                              simdjson::error_message(error)));
  }
  std::unordered_set<std::string_view> names;
  for (simdjson::dom::key_value_pair field : root) {
    if (!names.insert(field.key).second) return TensorError(field.key, "the name occurs twice");
    if (field.key == "__metadata__") continue;  // free text, never used
    if (absl::Status status = AddTensor(field.key, field.value); !status.ok()) return status;
  }
  if (absl::Status status = CheckLayout(); !status.ok()) return status;
  return std::move(entries_);
}

absl::Status HeaderParser::AddTensor(std::string_view name, simdjson::dom::element value) {
  if (name.empty()) return Error("a tensor has an empty name");
  if (name.size() > kMaxNameBytes) return TensorError(name, "the name is longer than 1024 bytes");
  simdjson::dom::object object;
  if (value.get(object)) return TensorError(name, "its entry is not an object");
  SafetensorsEntry entry;
  entry.name = std::string(name);
  bool has_dtype = false, has_shape = false, has_offsets = false;
  for (simdjson::dom::key_value_pair field : object) {
    absl::Status status;
    bool* seen = nullptr;
    if (field.key == "dtype") {
      seen = &has_dtype;
      std::string_view text;
      if (field.value.get(text)) return TensorError(name, "dtype is not a string");
      std::optional<DType> dtype = DTypeFromName(text);
      if (!dtype) {
        return TensorError(name,
                           absl::StrCat("dtype ", QuoteForMessage(text), " is not supported"));
      }
      entry.dtype = *dtype;
    } else if (field.key == "shape") {
      seen = &has_shape;
      status = ParseShape(field.value, entry);
    } else if (field.key == "data_offsets") {
      seen = &has_offsets;
      status = ParseOffsets(field.value, entry);
    } else {
      return TensorError(name, absl::StrCat("unknown key ", QuoteForMessage(field.key)));
    }
    if (!status.ok()) return status;
    if (*seen) return TensorError(name, absl::StrCat("key ", QuoteForMessage(field.key), " twice"));
    *seen = true;
  }
  if (!has_dtype) return TensorError(name, "dtype is missing");
  if (!has_shape) return TensorError(name, "shape is missing");
  if (!has_offsets) return TensorError(name, "data_offsets is missing");
  if (absl::Status status = CheckBytes(entry); !status.ok()) return status;
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::Status HeaderParser::ParseShape(simdjson::dom::element value, SafetensorsEntry& entry) const {
  simdjson::dom::array array;
  if (value.get(array)) return TensorError(entry.name, "shape is not an array");
  entry.shape.clear();
  for (simdjson::dom::element element : array) {
    uint64_t dim = 0;
    if (element.get(dim) || dim > uint64_t{std::numeric_limits<int64_t>::max()}) {
      return TensorError(entry.name, "shape holds something that is not a dimension");
    }
    if (entry.shape.size() == size_t{TensorView::kMaxRank}) {
      return TensorError(entry.name,
                         absl::StrCat("shape has more than ", TensorView::kMaxRank, " dimensions"));
    }
    entry.shape.push_back(static_cast<int64_t>(dim));
  }
  return absl::OkStatus();
}

absl::Status HeaderParser::ParseOffsets(simdjson::dom::element value,
                                        SafetensorsEntry& entry) const {
  simdjson::dom::array array;
  uint64_t begin = 0, end = 0;
  if (value.get(array) || array.size() != 2 || array.at(0).get(begin) || array.at(1).get(end)) {
    return TensorError(entry.name, "data_offsets is not a pair of offsets");
  }
  if (begin > end) {
    return TensorError(entry.name, absl::StrCat("data_offsets begin at ", begin, " and end at ",
                                                end, ", before their begin"));
  }
  const uint64_t limit = std::numeric_limits<uint64_t>::max() - data_begin_;
  if (end > limit) return TensorError(entry.name, absl::StrCat("offset ", end, " overflows"));
  entry.begin = data_begin_ + begin;
  entry.end = data_begin_ + end;
  return absl::OkStatus();
}

absl::Status HeaderParser::CheckBytes(const SafetensorsEntry& entry) const {
  uint64_t bytes = DTypeBytes(entry.dtype);
  for (int64_t dim : entry.shape) {
    // Capped as int64 so that every element count and byte offset later fits a signed index.
    uint64_t product = 0;
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(dim), &product) ||
        product > uint64_t{std::numeric_limits<int64_t>::max()}) {
      return TensorError(entry.name, "the size of its shape overflows");
    }
    bytes = product;
  }
  if (bytes != entry.end - entry.begin) {
    return TensorError(entry.name,
                       absl::StrCat("dtype and shape need ", bytes, " bytes, data_offsets hold ",
                                    entry.end - entry.begin));
  }
  return absl::OkStatus();
}

absl::Status HeaderParser::CheckLayout() {
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t expected = data_begin_;
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.begin != expected) {
      return TensorError(entry.name,
                         absl::StrCat(entry.begin < expected ? "overlaps the tensor before it"
                                                             : "leaves a hole before it",
                                      ": begins at byte ", entry.begin, ", expected ", expected));
    }
    expected = entry.end;
  }
  if (expected == file_bytes_) return absl::OkStatus();
  const std::string sizes =
      absl::StrCat("expected ", expected, " bytes, the file has ", file_bytes_);
  if (expected < file_bytes_) {
    return Error(absl::StrCat("bytes after the last tensor: ", sizes));
  }
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.end > file_bytes_) {
      return absl::DataLossError(absl::StrCat(file_, ": truncated (interrupted download?): ", sizes,
                                              "; first incomplete tensor ",
                                              QuoteForMessage(entry.name)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::string_view file,
                                                                     std::string_view prefix,
                                                                     uint64_t file_bytes) {
  const std::string name(file);
  if (file_bytes < kLengthBytes || prefix.size() < kLengthBytes) {
    return absl::DataLossError(absl::StrCat(
        name, ": truncated: expected at least 8 bytes (header length), the file has ", file_bytes));
  }
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= uint64_t{static_cast<uint8_t>(prefix[i])} << (8 * i);
  }
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": header of ", header_bytes, " bytes, the format allows ",
                     kMaxSafetensorsHeaderBytes, ": not a safetensors file?"));
  }
  if (header_bytes > file_bytes - kLengthBytes) {
    return absl::DataLossError(
        absl::StrCat(name, ": truncated (interrupted download?): the header alone needs ",
                     kLengthBytes + header_bytes, " bytes, the file has ", file_bytes));
  }
  if (header_bytes > prefix.size() - kLengthBytes) {
    return absl::InternalError(absl::StrCat(name, ": header not wholly given to the parser"));
  }
  HeaderParser parser(file, file_bytes, header_bytes);
  return parser.Parse(prefix.substr(kLengthBytes, header_bytes));
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile(std::move(mapped)));
  ASSIGN_OR_RETURN(file->entries_,
                   ParseSafetensorsHeader(path, file->mapped_.text(), file->file_bytes()));
  return file;
}

TensorView SafetensorsFile::View(const SafetensorsEntry& entry) const {
  TensorView view;
  view.data =
      const_cast<uint8_t*>(mapped_.data() + entry.begin);  // read-only pages; see the header
  view.dtype = entry.dtype;
  view.rank = static_cast<int>(entry.shape.size());
  std::copy(entry.shape.begin(), entry.shape.end(), view.shape.begin());
  return view;
}

}  // namespace tandem
