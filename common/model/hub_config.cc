#include "common/model/hub_config.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

constexpr uintmax_t kMaxJsonBytes = 16u << 20;

// Lists and objects are not shown: dump() recurses, and their depth is the file's choice.
std::string Shown(const nlohmann::json& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  return QuoteForMessage(value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
}

// A whole number written as an integer or, as some writers do, as 64.0.
std::optional<int64_t> AsInteger(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > uint64_t{std::numeric_limits<int64_t>::max()}) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  if (number != std::floor(number) || std::abs(number) > 0x1p53) return std::nullopt;
  return static_cast<int64_t>(number);
}

}  // namespace

HubConfig::HubConfig(const nlohmann::json& object, std::string where)
    : object_(&object), where_(std::move(where)) {
  TANDEM_CHECK(object.is_object());
}

void HubConfig::Adopt(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

void HubConfig::Fail(std::string_view key, std::string_view what) {
  Adopt(absl::InvalidArgumentError(
      absl::StrCat(where_, ": key ", QuoteForMessage(key), ": ", std::string(what))));
}

const nlohmann::json* HubConfig::Value(std::string_view key) const {
  const auto it = object_->find(std::string(key));
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool HubConfig::Has(std::string_view key) const { return Value(key) != nullptr; }

bool HubConfig::IsNull(std::string_view key) const {
  const auto it = object_->find(std::string(key));
  return it != object_->end() && it->is_null();
}

int HubConfig::Int(std::string_view key, IntBounds bounds) {
  if (!Has(key)) {
    Fail(key, "is required and missing");
    return static_cast<int>(bounds.min);
  }
  return IntOr(key, 0, bounds);
}

int HubConfig::IntOr(std::string_view key, int absent, IntBounds bounds) {
  const nlohmann::json* value = Value(key);
  if (value == nullptr) return absent;
  const std::optional<int64_t> number = AsInteger(*value);
  if (number && *number >= bounds.min && *number <= bounds.max) return static_cast<int>(*number);
  Fail(key, absl::StrCat("is ", Shown(*value), ", expected an integer from ", bounds.min, " to ",
                         bounds.max));
  return static_cast<int>(bounds.min);
}

std::optional<double> HubConfig::Number(std::string_view key, double min, double max) {
  const nlohmann::json* value = Value(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number > min && number <= max) return number;
  }
  Fail(key,
       absl::StrCat("is ", Shown(*value), ", expected a number above ", min, " and up to ", max));
  return max;
}

double HubConfig::Real(std::string_view key, double min, double max) {
  const std::optional<double> number = Number(key, min, max);
  if (!number) Fail(key, "is required and missing");
  return number.value_or(max);
}

double HubConfig::RealOr(std::string_view key, double absent, double min, double max) {
  return Number(key, min, max).value_or(absent);
}

std::optional<double> HubConfig::OptionalReal(std::string_view key, double min, double max) {
  return Number(key, min, max);
}

bool HubConfig::BoolOr(std::string_view key, bool absent) {
  return OptionalBool(key).value_or(absent);
}

std::optional<bool> HubConfig::OptionalBool(std::string_view key) {
  const nlohmann::json* value = Value(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  Fail(key, absl::StrCat("is ", Shown(*value), ", expected true or false"));
  return std::nullopt;
}

std::string HubConfig::StringOr(std::string_view key, std::string_view absent) {
  const nlohmann::json* value = Value(key);
  if (value == nullptr) return std::string(absent);
  if (value->is_string()) return value->get<std::string>();
  Fail(key, absl::StrCat("is ", Shown(*value), ", expected a string"));
  return std::string(absent);
}

std::vector<int> HubConfig::Ints(std::string_view key, IntBounds bounds) {
  std::vector<int> numbers;
  const nlohmann::json* value = Value(key);
  if (value == nullptr) return numbers;
  const size_t count = value->is_array() ? value->size() : 1;
  for (size_t i = 0; i < count; ++i) {
    const nlohmann::json& item = value->is_array() ? (*value)[i] : *value;
    const std::optional<int64_t> number = AsInteger(item);
    if (!number || *number < bounds.min || *number > bounds.max) {
      Fail(key, absl::StrCat("holds ", Shown(item), ", expected integers from ", bounds.min, " to ",
                             bounds.max));
      return {};
    }
    numbers.push_back(static_cast<int>(*number));
  }
  return numbers;
}

std::vector<uint32_t> HubConfig::TokenIds(std::string_view key) {
  const std::vector<int> ids = Ints(key, {.min = 0, .max = (1 << 24) - 1});
  return {ids.begin(), ids.end()};
}

const nlohmann::json* HubConfig::Object(std::string_view key) {
  const nlohmann::json* value = Value(key);
  if (value == nullptr || value->is_object()) return value;
  Fail(key, absl::StrCat("is ", Shown(*value), ", expected an object"));
  return nullptr;
}

absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& where) {
  nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": is not valid JSON"));
  }
  if (!json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": is not a JSON object"));
  }
  return json;
}

absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path) {
  std::error_code error;
  const uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) return absl::NotFoundError(absl::StrCat(path, ": ", error.message()));
  if (bytes > kMaxJsonBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", bytes, " bytes, the limit is ", kMaxJsonBytes));
  }
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) return absl::UnavailableError(absl::StrCat(path, ": cannot be read"));
  return ParseJsonObject(text.str(), path);
}

}  // namespace tandem
