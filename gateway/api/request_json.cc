#include "gateway/api/request_json.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "absl/strings/str_cat.h"
#include "gateway/api/api_error.h"

namespace tandem::gateway {
namespace {

constexpr size_t kMaxKeyInPath = 64;

// Builds the document from parser events. It exists beside nlohmann's own builder because it knows
// the path of the value in progress when the text breaks off, and bounds what it builds.
class DocumentBuilder : public nlohmann::json_sax<Json> {
 public:
  explicit DocumentBuilder(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Add(Json(nullptr)); }
  bool boolean(bool value) override { return Add(Json(value)); }
  bool number_integer(number_integer_t value) override { return Add(Json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Add(Json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return Add(Json(value)); }
  bool string(string_t& value) override { return Add(Json(std::move(value))); }
  bool binary(binary_t&) override { return Refuse("binary values are not JSON"); }
  bool start_object(std::size_t) override { return Open(Json::object()); }
  bool start_array(std::size_t) override { return Open(Json::array()); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    stack_.back().key = std::move(name);
    stack_.back().in_member = true;
    return true;
  }

  bool end_object() override {
    const Json::object_t& members = stack_.back().container->get_ref<const Json::object_t&>();
    std::vector<std::string_view> names;
    names.reserve(members.size());
    for (const auto& member : members) names.push_back(member.first);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) {
      stack_.back().key = std::string(*twice);
      stack_.back().in_member = true;
      return Refuse("the key occurs twice in one object");
    }
    return Close();
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    const std::string_view what = error.what();
    if (what.find("surrogate") != std::string_view::npos) {
      return Refuse("holds an unpaired surrogate escape");
    }
    if (what.find("UTF-8") != std::string_view::npos) return Refuse("is not valid UTF-8");
    if (what.find("out_of_range") != std::string_view::npos) {
      return Refuse("holds a number beyond the range of a double");
    }
    return Refuse(absl::StrCat("the body is not valid JSON (error at byte ", position, ")"));
  }

  Json TakeDocument() { return std::move(root_); }
  const absl::Status& status() const { return status_; }

 private:
  struct Frame {
    Json* container = nullptr;
    std::string key;         // of an object: the member being read
    bool in_member = false;  // a key has been read, its value has not
  };

  bool Refuse(std::string_view why) {
    const std::string path = Path();
    status_ = path.empty() ? absl::InvalidArgumentError(absl::string_view(why.data(), why.size()))
                           : FieldError(path, absl::StrCat(path, ": ", std::string(why)));
    return false;
  }

  std::string Path() const {
    std::string path;
    for (const Frame& frame : stack_) {
      if (frame.container->is_array()) {
        absl::StrAppend(&path, "[", frame.container->size() - (&frame != &stack_.back()), "]");
      } else if (frame.in_member) {
        absl::StrAppend(&path, path.empty() ? "" : ".", frame.key.substr(0, kMaxKeyInPath));
      }
    }
    return path;
  }

  // The place of `value` in the container that is open.
  Json* Place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Frame& frame = stack_.back();
    if (frame.container->is_array()) {
      auto& elements = frame.container->get_ref<Json::array_t&>();
      elements.push_back(std::move(value));
      return &elements.back();
    }
    // The vector's own push_back: ordered_map's insertion looks for the key and is quadratic.
    auto& members = frame.container->get_ref<Json::object_t&>();
    members.push_back({frame.key, std::move(value)});
    return &members.back().second;
  }

  bool Add(Json value) {
    if (++values_ > limits_.max_values) return Refuse("has too many values");
    Place(std::move(value));
    if (!stack_.empty()) stack_.back().in_member = false;
    return true;
  }

  bool Open(Json container) {
    if (++values_ > limits_.max_values) return Refuse("has too many values");
    if (stack_.size() >= limits_.max_depth) return Refuse("is nested too deeply");
    Json* const place = Place(std::move(container));
    stack_.push_back({.container = place, .key = {}, .in_member = false});
    return true;
  }

  bool Close() {
    stack_.pop_back();
    if (!stack_.empty()) stack_.back().in_member = false;
    return true;
  }

  JsonLimits limits_;
  Json root_;
  std::vector<Frame> stack_;
  size_t values_ = 0;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<Json> ParseRequestJson(std::string_view text, const JsonLimits& limits) {
  try {
    DocumentBuilder builder(limits);
    if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
      return builder.status().ok() ? absl::InvalidArgumentError("the body is not valid JSON")
                                   : builder.status();
    }
    Json document = builder.TakeDocument();
    if (!document.is_object()) {
      return absl::InvalidArgumentError("the body must be a JSON object");
    }
    return document;
  } catch (const std::exception&) {
    return absl::ResourceExhaustedError("the body could not be parsed within the memory limits");
  }
}

FieldReader::FieldReader(const Json& object, std::string prefix)
    : object_(object), prefix_(std::move(prefix)) {}

const Json* FieldReader::Find(std::string_view key) const {
  const auto member = object_.find(std::string(key));
  if (member == object_.end() || member->is_null()) return nullptr;
  return &*member;
}

void FieldReader::Fail(std::string_view key, std::string_view message) {
  const std::string path = Path(key);
  Fail(FieldError(path, absl::StrCat(path, " ", std::string(message))));
}

void FieldReader::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

void FieldReader::Boolean(std::string_view key, bool* out) {
  const Json* const value = Find(key);
  if (value == nullptr) return;
  if (!value->is_boolean()) return Fail(key, "must be true or false");
  *out = value->get<bool>();
}

void FieldReader::Number(std::string_view key, std::optional<double>* out) {
  const Json* const value = Find(key);
  if (value == nullptr) return;
  if (!value->is_number()) return Fail(key, "must be a number");
  *out = value->get<double>();
}

void FieldReader::Integer(std::string_view key, std::optional<int64_t>* out) {
  const Json* const value = Find(key);
  if (value == nullptr) return;
  const std::optional<int64_t> integer = AsInteger(*value);
  if (!integer) return Fail(key, "must be an integer of at most 64 bits");
  *out = integer;
}

void FieldReader::Text(std::string_view key, std::optional<std::string>* out) {
  const Json* const value = Find(key);
  if (value == nullptr) return;
  if (!value->is_string()) return Fail(key, "must be a string");
  *out = value->get<std::string>();
}

void FieldReader::TokenIds(std::string_view key, std::vector<uint32_t>* out) {
  const Json* const value = Find(key);
  if (value == nullptr) return;
  if (!value->is_array()) return Fail(key, "must be an array of token ids");
  Fail(ReadTokenIds(*value, Path(key), out));
}

std::optional<int64_t> AsInteger(const Json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  // 2^53: above it a double no longer names one integer.
  if (std::abs(number) > 9007199254740992.0 || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

absl::Status ReadTokenIds(const Json& array, std::string_view path, std::vector<uint32_t>* out) {
  out->clear();
  out->reserve(array.size());
  for (const Json& element : array) {
    const std::optional<int64_t> id = AsInteger(element);
    if (!id || *id < 0 || *id > int64_t{UINT32_MAX}) {
      return FieldError(std::string(path),
                        absl::StrCat(std::string(path), "[", out->size(), "] is not a token id"));
    }
    out->push_back(static_cast<uint32_t>(*id));
  }
  return absl::OkStatus();
}

}  // namespace tandem::gateway
