#pragma once

// A reader of one JSON object of a hub config (config.json, generation_config.json, rope_scaling):
// typed, bounded, and with the hub's rule that null means absent. The first error sticks and later
// reads return harmless values, so a family reads its keys in a row and asks `status()` once.
//
// Not thread-safe. Holds a pointer to the JSON, which must outlive it.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

struct IntBounds {
  int64_t min = 1;
  int64_t max = 1 << 24;
};

class HubConfig {
 public:
  // `where` names file and object in messages ("/m/config.json", "/m/config.json: rope_scaling").
  // REQUIRES: `object` is a JSON object.
  HubConfig(const nlohmann::json& object, std::string where);

  const std::string& where() const { return where_; }
  const absl::Status& status() const { return status_; }
  // Takes over another reader's first error, if this one has none.
  void Adopt(const absl::Status& status);
  // Records "where: key 'key': what" if there is no error yet.
  void Fail(std::string_view key, std::string_view what);

  bool Has(std::string_view key) const;     // present and not null
  bool IsNull(std::string_view key) const;  // present and null
  int Int(std::string_view key, IntBounds bounds);
  int IntOr(std::string_view key, int absent, IntBounds bounds);
  // Finite; integers are accepted as numbers. `min` is exclusive.
  double Real(std::string_view key, double min, double max);
  double RealOr(std::string_view key, double absent, double min, double max);
  std::optional<double> OptionalReal(std::string_view key, double min, double max);
  bool BoolOr(std::string_view key, bool absent);
  std::optional<bool> OptionalBool(std::string_view key);
  std::string StringOr(std::string_view key, std::string_view absent);
  std::vector<int> Ints(std::string_view key, IntBounds bounds);  // absent: empty
  std::vector<uint32_t> TokenIds(std::string_view key);           // one id or a list; absent: empty
  // Null when absent.
  const nlohmann::json* Object(std::string_view key);

 private:
  const nlohmann::json* Value(std::string_view key) const;  // null when absent or JSON null
  std::optional<double> Number(std::string_view key, double min, double max);

  const nlohmann::json* object_;
  std::string where_;
  absl::Status status_;
};

// Reads and parses one file of at most 16 MB whose root is an object.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path);
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& where);

}  // namespace tandem
