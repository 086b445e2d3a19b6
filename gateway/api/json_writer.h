#pragma once

// Writes JSON text front to back. The output is strict JSON for any input: invalid UTF-8 becomes
// U+FFFD, numbers that JSON lacks (NaN, infinities) become -9999.0, the floor that OpenAI's API
// uses for log-probabilities. Floats are written with the fewest digits that read back as the same
// float32.
//
//   JsonWriter json;
//   json.BeginObject().Key("id").String(id).Key("tokens").BeginArray().Uint(1).EndArray().EndObject();
//   std::string text = json.Take();
//
// One owner. REQUIRES: calls describe one well-formed value (not checked).

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tandem::gateway {

class JsonWriter {
 public:
  JsonWriter& BeginObject() { return Open('{'); }
  JsonWriter& EndObject() { return Close('}'); }
  JsonWriter& BeginArray() { return Open('['); }
  JsonWriter& EndArray() { return Close(']'); }
  JsonWriter& Key(std::string_view key);

  JsonWriter& String(std::string_view value);
  JsonWriter& OptionalString(const std::optional<std::string>& value);
  JsonWriter& Null() { return Raw("null"); }
  JsonWriter& Bool(bool value) { return Raw(value ? "true" : "false"); }
  JsonWriter& Int(int64_t value) { return Raw(std::to_string(value)); }
  JsonWriter& Uint(uint64_t value) { return Raw(std::to_string(value)); }
  JsonWriter& Float(float value);
  // `json` is a whole JSON value already.
  JsonWriter& Raw(std::string_view json);

  std::string Take() { return std::move(out_); }

 private:
  JsonWriter& Open(char bracket);
  JsonWriter& Close(char bracket);
  void Separate();
  void AppendString(std::string_view value);

  std::string out_;
  bool comma_ = false;  // the next value or key needs one before it
};

}  // namespace tandem::gateway
