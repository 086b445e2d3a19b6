#include "gateway/text/json_reader.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {
namespace {

// A JSON null that outlives every document: what absent members read as.
simdjson::dom::element NullElement() {
  thread_local simdjson::dom::parser parser;
  thread_local simdjson::dom::element null = [] {
    simdjson::dom::element element;
    if (parser.parse(std::string_view("null")).get(element) != simdjson::SUCCESS) std::abort();
    return element;
  }();
  return null;
}

}  // namespace

std::string Excerpt(std::string_view text) {
  constexpr size_t kMax = 80;
  size_t size = std::min(text.size(), kMax);
  while (size < text.size() && size > 0 && (text[size] & 0xC0) == 0x80) --size;
  std::string out(text.substr(0, size));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  if (size < text.size()) out += "...";
  return out;
}

JsonReader JsonReader::Member(std::string_view key) const {
  std::string path = path_;
  absl::StrAppend(&path, path.ends_with(": ") ? "" : ".", std::string(key));
  simdjson::dom::element member;
  if (value_.is_object() &&
      value_.get_object().value_unsafe().at_key(key).get(member) == simdjson::SUCCESS) {
    return JsonReader(member, std::move(path));
  }
  return JsonReader(NullElement(), std::move(path));
}

JsonReader JsonReader::Element(simdjson::dom::element element, size_t index) const {
  return JsonReader(element, absl::StrCat(path_, "[", index, "]"));
}

absl::StatusOr<simdjson::dom::object> JsonReader::Object() const {
  simdjson::dom::object object;
  if (value_.get(object) != simdjson::SUCCESS) return Invalid("must be an object");
  return object;
}

absl::StatusOr<simdjson::dom::array> JsonReader::Array() const {
  simdjson::dom::array array;
  if (value_.get(array) != simdjson::SUCCESS) return Invalid("must be an array");
  return array;
}

absl::StatusOr<std::string_view> JsonReader::String() const {
  std::string_view text;
  if (value_.get(text) != simdjson::SUCCESS) return Invalid("must be a string");
  return text;
}

absl::StatusOr<uint64_t> JsonReader::Unsigned() const {
  uint64_t number = 0;
  if (value_.get(number) != simdjson::SUCCESS) return Invalid("must be a whole number >= 0");
  return number;
}

absl::StatusOr<bool> JsonReader::Bool(bool absent) const {
  if (value_.is_null()) return absent;
  bool flag = false;
  if (value_.get(flag) != simdjson::SUCCESS) return Invalid("must be true or false");
  return flag;
}

absl::Status JsonReader::Invalid(std::string_view what) const {
  return absl::InvalidArgumentError(absl::StrCat(path_, ": ", std::string(what)));
}

absl::Status JsonReader::Unsupported(std::string_view what) const {
  return absl::UnimplementedError(absl::StrCat(path_, ": ", std::string(what)));
}

absl::Status JsonReader::OnlyKeys(std::initializer_list<std::string_view> keys) const {
  const absl::StatusOr<simdjson::dom::object> object = Object();
  if (!object.ok()) return object.status();
  for (const auto& [key, value] : *object) {
    bool set = true;
    if (value.is_null() || (value.get(set) == simdjson::SUCCESS && !set)) continue;
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      return Unsupported("key \"" + Excerpt(key) + "\" is not supported");
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem::gateway
