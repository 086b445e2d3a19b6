// A set of GGUF files as one model, and typed access to its key/values.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/gguf.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

constexpr int64_t kMaxFiles = 99999;  // five digits in the names
constexpr const char* kSplitNo = "split.no";
constexpr const char* kSplitCount = "split.count";
constexpr const char* kSplitTensors = "split.tensors.count";

std::optional<int64_t> IntegerOf(const GgufValue& value) {
  if (value.kind == GgufKind::kSigned) return value.signed_value;
  if (value.kind != GgufKind::kUnsigned ||
      value.unsigned_value > uint64_t{std::numeric_limits<int64_t>::max()}) {
    return std::nullopt;
  }
  return static_cast<int64_t>(value.unsigned_value);
}

std::optional<int64_t> SplitValue(const GgufModel::File& file, std::string_view key) {
  const auto it = file.contents.values.find(key);
  return it == file.contents.values.end() ? std::nullopt : IntegerOf(it->second);
}

}  // namespace

absl::StatusOr<std::optional<std::string>> FindGguf(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr std::string_view kSuffix = ".gguf";
  if (path.ends_with(kSuffix)) return std::optional<std::string>(path);
  std::optional<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("model.safetensors")) return std::optional<std::string>();
    if (!name.ends_with(kSuffix)) continue;
    // Of a set, the first file stands for all.
    const std::string file = it->path().string();
    const std::string_view number(file.data() + file.size() - std::min<size_t>(file.size(), 19), 5);
    if (GgufSplitPath(file, 0, 1) && number != "00001") continue;
    if (found) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": holds several models, among them ",
                                                     *found, " and ", file,
                                                     ": name the one to use"));
    }
    found = file;
  }
  return found;
}

std::optional<std::string> GgufSplitPath(std::string_view path, int64_t index, int64_t count) {
  // "-00001-of-00003.gguf"
  constexpr size_t kSuffix = 20;
  if (path.size() <= kSuffix) return std::nullopt;
  const std::string_view suffix = path.substr(path.size() - kSuffix);
  std::string shape(suffix);
  for (char& c : shape) {
    if (c >= '0' && c <= '9') c = '0';
  }
  if (shape != "-00000-of-00000.gguf") return std::nullopt;
  char text[64];
  std::snprintf(text, sizeof(text), "-%05lld-of-%05lld.gguf", static_cast<long long>(index + 1),
                static_cast<long long>(count));
  return absl::StrCat(std::string(path.substr(0, path.size() - kSuffix)), text);
}

absl::StatusOr<std::unique_ptr<GgufModel>> GgufModel::Open(const std::string& path) {
  std::unique_ptr<GgufModel> model(new GgufModel);
  RETURN_IF_ERROR(model->AddFile(path));
  RETURN_IF_ERROR(model->AddSplits());
  for (const File& file : model->files_) {
    for (const GgufTensor& tensor : file.contents.tensors) {
      const auto [other, inserted] = model->by_name_.emplace(tensor.name, &tensor);
      if (!inserted) {
        return absl::InvalidArgumentError(
            absl::StrCat(std::string(tensor.file), ": tensor ", QuoteForMessage(tensor.name),
                         ": is also in ", std::string(other->second->file)));
      }
      model->tensors_.push_back(&tensor);
    }
  }
  ASSIGN_OR_RETURN(const std::optional<int64_t> tensors, model->Int(kSplitTensors));
  if (tensors && model->files_.size() > 1 &&
      *tensors != static_cast<int64_t>(model->tensors_.size())) {
    return model->KeyError(
        kSplitTensors, absl::StrCat("is ", *tensors, ", the files hold ", model->tensors_.size()));
  }
  return model;
}

absl::Status GgufModel::AddFile(const std::string& path) {
  ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  File file;
  file.mapped = std::make_unique<MappedFile>(std::move(mapped));
  ASSIGN_OR_RETURN(file.contents, ParseGguf(file.mapped->path(), file.mapped->text()));
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::Status GgufModel::AddSplits() {
  ASSIGN_OR_RETURN(const std::optional<int64_t> given, Int(kSplitCount));
  const int64_t count = given.value_or(1);
  if (count <= 1) return absl::OkStatus();
  if (count > kMaxFiles) return KeyError(kSplitCount, absl::StrCat("is ", count));
  const std::string first = path();
  const std::optional<std::string> expected = GgufSplitPath(first, 0, count);
  if (!expected) {
    return KeyError(kSplitCount,
                    absl::StrCat("is ", count, ", but the file's name does not end in -00001-of-",
                                 "0000N.gguf, which leads to the others"));
  }
  if (*expected != first) {
    return KeyError(kSplitNo,
                    absl::StrCat("the file is not the first of its set, ", *expected, " is"));
  }
  RETURN_IF_ERROR(CheckSplit(0, count));
  for (int64_t index = 1; index < count; ++index) {
    const std::string next = *GgufSplitPath(first, index, count);
    std::error_code error;
    if (!std::filesystem::exists(next, error)) {
      return absl::NotFoundError(absl::StrCat(first, ": is the first of ", count,
                                              " files, of which ", next, " is missing"));
    }
    RETURN_IF_ERROR(AddFile(next));
    RETURN_IF_ERROR(CheckSplit(index, count));
  }
  return absl::OkStatus();
}

absl::Status GgufModel::CheckSplit(int64_t index, int64_t count) const {
  const File& file = files_.back();
  const std::optional<int64_t> no = SplitValue(file, kSplitNo);
  const std::optional<int64_t> of = SplitValue(file, kSplitCount);
  if (no == index && of == count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(file.mapped->path(), ": keys '", kSplitNo, "' and '", kSplitCount, "' say file ",
                   no ? absl::StrCat(*no) : "(none)", " of ", of ? absl::StrCat(*of) : "(none)",
                   ", its name says ", index, " of ", count));
}

const GgufTensor* GgufModel::FindTensor(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : it->second;
}

const GgufValue* GgufModel::Find(std::string_view key) const {
  const auto& values = files_.front().contents.values;
  const auto it = values.find(key);
  return it == values.end() ? nullptr : &it->second;
}

absl::Status GgufModel::KeyError(std::string_view key, std::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrCat(path(), ": key ", QuoteForMessage(key), ": ", std::string(what)));
}

absl::StatusOr<std::optional<int64_t>> GgufModel::Int(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::optional<int64_t>();
  const std::optional<int64_t> number = IntegerOf(*value);
  if (!number) return KeyError(key, "is not an integer");
  return number;
}

absl::StatusOr<std::optional<double>> GgufModel::Real(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::optional<double>();
  if (value->kind == GgufKind::kReal) return std::optional<double>(value->real);
  const std::optional<int64_t> number = IntegerOf(*value);
  if (!number) return KeyError(key, "is not a number");
  return std::optional<double>(static_cast<double>(*number));
}

absl::StatusOr<std::optional<bool>> GgufModel::Bool(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::optional<bool>();
  if (value->kind != GgufKind::kBool) return KeyError(key, "is not a boolean");
  return std::optional<bool>(value->boolean);
}

absl::StatusOr<std::optional<std::string_view>> GgufModel::String(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::optional<std::string_view>();
  if (value->kind != GgufKind::kString) return KeyError(key, "is not a string");
  return std::optional<std::string_view>(value->string);
}

absl::StatusOr<const std::vector<std::string_view>*> GgufModel::Strings(
    std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return nullptr;
  if (value->kind != GgufKind::kArray || value->element_kind != GgufKind::kString) {
    return KeyError(key, "is not an array of strings");
  }
  return &value->strings;
}

absl::StatusOr<const std::vector<int64_t>*> GgufModel::Ints(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return nullptr;
  if (value->kind != GgufKind::kArray || value->element_kind == GgufKind::kString ||
      value->element_kind == GgufKind::kReal || value->element_kind == GgufKind::kArray) {
    return KeyError(key, "is not an array of integers");
  }
  return &value->integers;
}

}  // namespace tandem
