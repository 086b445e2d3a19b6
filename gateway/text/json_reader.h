#pragma once

// A typed view of one JSON value that knows where it stands, so that every error names source and
// key ("tokenizer.json: pre_tokenizer.pretokenizers[0].behavior: ..."). Views live as long as the
// simdjson document they come from.

#include <simdjson.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::gateway {

class JsonReader {
 public:
  JsonReader(simdjson::dom::element value, std::string path)
      : value_(value), path_(std::move(path)) {}

  const simdjson::dom::element& value() const { return value_; }
  const std::string& path() const { return path_; }
  bool is_null() const { return value_.is_null(); }
  bool is_object() const { return value_.is_object(); }
  bool is_array() const { return value_.is_array(); }
  bool is_string() const { return value_.is_string(); }

  // The member `key`; a JSON null where it is absent or this is not an object.
  JsonReader Member(std::string_view key) const;
  JsonReader Element(simdjson::dom::element element, size_t index) const;

  absl::StatusOr<simdjson::dom::object> Object() const;
  absl::StatusOr<simdjson::dom::array> Array() const;
  absl::StatusOr<std::string_view> String() const;
  absl::StatusOr<uint64_t> Unsigned() const;
  // `absent` stands for null and for a missing member.
  absl::StatusOr<bool> Bool(bool absent) const;

  // INVALID_ARGUMENT and UNIMPLEMENTED naming this value.
  absl::Status Invalid(std::string_view what) const;
  absl::Status Unsupported(std::string_view what) const;
  // UNIMPLEMENTED if this object has a member outside `keys` that is neither null nor false.
  absl::Status OnlyKeys(std::initializer_list<std::string_view> keys) const;

 private:
  simdjson::dom::element value_;
  std::string path_;
};

// Text from outside as it may stand in an error message: at most 80 bytes, controls replaced.
std::string Excerpt(std::string_view text);

}  // namespace tandem::gateway
