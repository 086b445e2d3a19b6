#pragma once

// Structured logging: one `key=value` line an event, through spdlog to stderr.
//   LogInfo("model_loaded", {{"dir", dir}, {"bytes", LogValue(n)}});
// prints  2026-01-01T00:00:00.000Z info service=gateway event=model_loaded dir=... bytes=...
// Values with blanks or quotes are quoted and escaped. Never pass prompt text. Thread-safe.

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace tandem {

struct LogField {
  std::string_view key;
  std::string value;
};

template <typename T>
std::string LogValue(const T& number) {
  return std::to_string(number);
}

// Names this process in every line; call once at the start of main. `level`: debug, info, warn or
// error; an unknown level means info.
void InitLogging(std::string_view service, std::string_view level);

void LogDebug(std::string_view event, std::initializer_list<LogField> fields = {});
void LogInfo(std::string_view event, std::initializer_list<LogField> fields = {});
void LogWarn(std::string_view event, std::initializer_list<LogField> fields = {});
void LogError(std::string_view event, std::initializer_list<LogField> fields = {});

}  // namespace tandem
