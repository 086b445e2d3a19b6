#include "common/base/options.h"

#include <CLI/CLI.hpp>
#include <cctype>
#include <cstdlib>
#include <iostream>

#include "common/base/log.h"

namespace tandem {
namespace {

std::string EnvironmentName(std::string_view option) {
  std::string name = "TANDEM_";
  for (const char c : option) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

// Kubernetes injects NAME_PORT=tcp://... for every Service of the namespace.
bool IsServiceLink(const char* value) {
  const std::string_view text(value);
  return text.starts_with("tcp://") || text.starts_with("udp://") || text.starts_with("sctp://");
}

std::string Flag(std::string_view name) { return "--" + std::string(name); }

}  // namespace

OptionParser::OptionParser(std::string_view program, std::string_view description)
    : owned_(std::make_unique<CLI::App>(std::string(description), std::string(program))),
      app_(owned_.get()) {
  app_->set_version_flag("--version", std::string(program) + " " TANDEM_VERSION);
}

OptionParser::OptionParser(OptionParser& parent, std::string_view name,
                           std::string_view description)
    : app_(parent.app_->add_subcommand(std::string(name), std::string(description))) {}

OptionParser::~OptionParser() = default;

CLI::Option* OptionParser::Finish(CLI::Option* option, std::string_view name) {
  const std::string environment = EnvironmentName(name);
  const char* value = std::getenv(environment.c_str());
  if (value != nullptr && IsServiceLink(value)) {
    LogWarn("environment_ignored", {{"name", environment}, {"reason", "kubernetes service link"}});
  } else {
    option->envname(environment);
  }
  last_ = option;
  return option;
}

void OptionParser::Add(std::string_view name, std::string_view help, int* value, IntRange range) {
  const int64_t low = std::max<int64_t>(range.min, std::numeric_limits<int>::min());
  const int64_t high = std::min<int64_t>(range.max, std::numeric_limits<int>::max());
  Finish(app_->add_option(Flag(name), *value, std::string(help)), name)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->check(CLI::Range(low, high))
      ->capture_default_str();
}

void OptionParser::Add(std::string_view name, std::string_view help, int64_t* value,
                       IntRange range) {
  Finish(app_->add_option(Flag(name), *value, std::string(help)), name)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->check(CLI::Range(range.min, range.max))
      ->capture_default_str();
}

void OptionParser::Add(std::string_view name, std::string_view help, std::string* value) {
  Finish(app_->add_option(Flag(name), *value, std::string(help)), name)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->capture_default_str();
}

void OptionParser::Add(std::string_view name, std::string_view help, double* value,
                       RealRange range) {
  CLI::Option* option = Finish(app_->add_option(Flag(name), *value, std::string(help)), name)
                            ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
                            ->capture_default_str();
  if (range.min > RealRange{}.min || range.max < RealRange{}.max) {
    option->check(CLI::Range(range.min, range.max));
  }
}

void OptionParser::AddFlag(std::string_view name, std::string_view help, bool* value) {
  Finish(app_->add_flag(Flag(name), *value, std::string(help)), name);
}

void OptionParser::AddList(std::string_view name, std::string_view help,
                           std::vector<std::string>* values) {
  Finish(app_->add_option(Flag(name), *values, std::string(help)), name)->delimiter(',');
}

void OptionParser::AddChoice(std::string_view name, std::string_view help, std::string* value,
                             std::vector<std::string> choices) {
  Finish(app_->add_option(Flag(name), *value, std::string(help)), name)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->check(CLI::IsMember(std::move(choices)))
      ->capture_default_str();
}

void OptionParser::AddPositional(std::string_view name, std::string_view help, std::string* value) {
  last_ = app_->add_option(std::string(name), *value, std::string(help));
}

void OptionParser::Required() { last_->required(); }

void OptionParser::RequireSubcommand() { app_->require_subcommand(1); }

std::optional<int> OptionParser::Parse(int argc, const char* const* argv) {
  try {
    app_->parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    const int code = app_->exit(error, std::cout, std::cerr);
    return code == 0 ? 0 : 2;
  }
}

bool OptionParser::Chosen() const { return app_->parsed(); }

std::string OptionParser::Summary() const {
  std::string summary;
  for (const CLI::Option* option : app_->get_options()) {
    const std::string name = option->get_name();
    if (name == "--help" || name == "--version" || name.find("key") != std::string::npos) continue;
    if (!summary.empty()) summary += ' ';
    const std::string given =
        option->count() > 0 ? CLI::detail::join(option->results(), ",") : option->get_default_str();
    summary += name + "=" + given;
  }
  return summary;
}

}  // namespace tandem
