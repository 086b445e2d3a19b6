#include "common/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace tandem {
namespace {

spdlog::logger& Logger() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("tandem",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %v", spdlog::pattern_time_type::utc);
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return *logger;
}

std::string& ServiceName() {
  static std::string name = "tandem";
  return name;
}

bool NeedsQuotes(std::string_view value) {
  if (value.empty()) return true;
  for (const char c : value) {
    if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7f) return true;
  }
  return false;
}

void AppendValue(std::string& line, std::string_view value) {
  if (!NeedsQuotes(value)) {
    line += value;
    return;
  }
  line += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      line += '\\';
      line += c;
    } else if (c == '\n') {
      line += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      line += '?';
    } else {
      line += c;
    }
  }
  line += '"';
}

void Write(spdlog::level::level_enum level, std::string_view event,
           std::initializer_list<LogField> fields) {
  spdlog::logger& logger = Logger();
  if (!logger.should_log(level)) return;
  std::string line = "service=" + ServiceName() + " event=";
  AppendValue(line, event);
  for (const LogField& field : fields) {
    line += ' ';
    line += field.key;
    line += '=';
    AppendValue(line, field.value);
  }
  logger.log(level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace

void InitLogging(std::string_view service, std::string_view level) {
  ServiceName() = std::string(service);
  spdlog::level::level_enum parsed = spdlog::level::info;
  if (level == "debug") parsed = spdlog::level::debug;
  if (level == "warn") parsed = spdlog::level::warn;
  if (level == "error") parsed = spdlog::level::err;
  Logger().set_level(parsed);
}

void LogDebug(std::string_view event, std::initializer_list<LogField> fields) {
  Write(spdlog::level::debug, event, fields);
}
void LogInfo(std::string_view event, std::initializer_list<LogField> fields) {
  Write(spdlog::level::info, event, fields);
}
void LogWarn(std::string_view event, std::initializer_list<LogField> fields) {
  Write(spdlog::level::warn, event, fields);
}
void LogError(std::string_view event, std::initializer_list<LogField> fields) {
  Write(spdlog::level::err, event, fields);
}

}  // namespace tandem
