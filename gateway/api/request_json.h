#pragma once

// JSON from clients: untrusted text in, a bounded document or an error that names the field out.
//
// ParseRequestJson refuses what is not strict JSON (invalid UTF-8 and unpaired surrogates
// included), deeper, larger or with duplicate keys; the status is INVALID_ARGUMENT with the path of
// the value at fault as its param. FieldReader reads members of an object; JSON null counts as
// absent. The first error sticks, so a caller reads all its fields and checks status() once.
//
//   FieldReader reader(document);
//   reader.Number("temperature", &fields.temperature);
//   reader.Boolean("stream", &stream);
//   RETURN_IF_ERROR(reader.status());
//
// Thread safety: one owner. A FieldReader must not outlive its document.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::gateway {

// Members keep the order of the text: chat templates print them.
using Json = nlohmann::ordered_json;

struct JsonLimits {
  size_t max_depth = 64;
  // 16 bytes each in memory; a prompt of token ids is the largest honest use.
  size_t max_values = size_t{4} << 20;
};

absl::StatusOr<Json> ParseRequestJson(std::string_view text, const JsonLimits& limits = {});

class FieldReader {
 public:
  // `prefix` comes before member names in errors, e.g. "stream_options.".
  explicit FieldReader(const Json& object, std::string prefix = {});

  // The member, or nullptr where it is absent or null.
  const Json* Find(std::string_view key) const;
  bool Has(std::string_view key) const { return Find(key) != nullptr; }

  // Each leaves `*out` alone where the member is absent.
  void Boolean(std::string_view key, bool* out);
  void Number(std::string_view key, std::optional<double>* out);
  // Integers of any sign; integral floats such as 16.0 count, values beyond 64 bits do not.
  void Integer(std::string_view key, std::optional<int64_t>* out);
  void Text(std::string_view key, std::optional<std::string>* out);
  // An array of token ids (each 0 ... 2^32 - 1).
  void TokenIds(std::string_view key, std::vector<uint32_t>* out);

  void Fail(std::string_view key, std::string_view message);
  void Fail(absl::Status status);
  const absl::Status& status() const { return status_; }
  std::string Path(std::string_view key) const { return prefix_ + std::string(key); }

 private:
  const Json& object_;
  std::string prefix_;
  absl::Status status_;
};

// An integral JSON number within int64, else nothing.
std::optional<int64_t> AsInteger(const Json& value);
// Token ids of an array; the error names `path`[i].
absl::Status ReadTokenIds(const Json& array, std::string_view path, std::vector<uint32_t>* out);

}  // namespace tandem::gateway
