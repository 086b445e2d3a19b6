#pragma once

// Copies JSON text value by value, letting a function change every string and key on the way.
// Numbers are copied as they are spelled, keys keep their order. Recursion-free.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem::gateway {

// One step of the way from the root: a member's key or an element's index.
struct JsonStep {
  bool in_object = false;
  std::string key;
  size_t index = 0;
};
using JsonPath = std::vector<JsonStep>;

struct JsonVisitor {
  // The JSON text that takes a string value's place.
  std::function<std::string(const JsonPath& path, const std::string& value)> value;
  // The JSON text that takes a key's place; `path` leads to the object.
  std::function<std::string(const JsonPath& path, const std::string& key)> key;
};

// INVALID_ARGUMENT ("not JSON: ...") for broken text, invalid UTF-8 and nesting beyond 64.
absl::StatusOr<std::string> CopyJson(std::string_view json, const JsonVisitor& visitor);

// The root's first character is `open` ('[' or '{'), blanks aside.
bool JsonBeginsWith(std::string_view json, char open);

}  // namespace tandem::gateway
