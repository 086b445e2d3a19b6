#include "gateway/api/json_writer.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "gateway/text/detokenizer.h"

namespace tandem::gateway {
namespace {

bool IsAscii(std::string_view value) {
  return std::all_of(value.begin(), value.end(), [](unsigned char c) { return c < 0x80; });
}

void AppendEscaped(std::string_view valid_utf8, std::string* out) {
  constexpr char kHex[] = "0123456789abcdef";
  for (const char c : valid_utf8) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      default:
        if (byte < 0x20) {
          *out += "\\u00";
          *out += kHex[byte >> 4];
          *out += kHex[byte & 15];
        } else {
          *out += c;
        }
    }
  }
}

}  // namespace

void JsonWriter::Separate() {
  if (comma_) out_ += ',';
  comma_ = true;
}

JsonWriter& JsonWriter::Open(char bracket) {
  Separate();
  out_ += bracket;
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::Close(char bracket) {
  out_ += bracket;
  comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::Key(std::string_view key) {
  Separate();
  AppendString(key);
  out_ += ':';
  comma_ = false;
  return *this;
}

void JsonWriter::AppendString(std::string_view value) {
  out_ += '"';
  if (IsAscii(value)) {
    AppendEscaped(value, &out_);
  } else {
    std::string valid;
    Utf8Stream stream;
    stream.Append(value, &valid);
    stream.Flush(&valid);
    AppendEscaped(valid, &out_);
  }
  out_ += '"';
}

JsonWriter& JsonWriter::String(std::string_view value) {
  Separate();
  AppendString(value);
  return *this;
}

JsonWriter& JsonWriter::OptionalString(const std::optional<std::string>& value) {
  return value ? String(*value) : Null();
}

JsonWriter& JsonWriter::Float(float value) {
  if (!std::isfinite(value)) return Raw("-9999.0");
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  std::string text(digits, end);
  // Typed clients tell integers from floats by the spelling.
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return Raw(text);
}

JsonWriter& JsonWriter::Raw(std::string_view json) {
  Separate();
  out_ += json;
  return *this;
}

}  // namespace tandem::gateway
