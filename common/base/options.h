#pragma once

// Command-line options of a process, over CLI11. Every option `--like-this` can also be given as
// environment TANDEM_LIKE_THIS; the flag wins, and of a flag given twice the last. Values are
// validated while parsing and an error names the option and what it accepts. Environment values
// that Kubernetes injects for a Service
// ("tcp://10.0.0.7:8080") are ignored with one log line.
//
//   OptionParser options("tandem-gateway", "Schedules requests");
//   options.Add("http-port", "Port of the HTTP API; 0 picks one", &port, {.min = 0, .max = 65535});
//   if (std::optional<int> exit_code = options.Parse(argc, argv)) return *exit_code;

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tandem {

struct RealRange {
  double min = std::numeric_limits<double>::lowest();
  double max = std::numeric_limits<double>::max();
};

struct IntRange {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};

class OptionParser {
 public:
  OptionParser(std::string_view program, std::string_view description);
  // A subcommand of `parent`, which must outlive it.
  OptionParser(OptionParser& parent, std::string_view name, std::string_view description);
  ~OptionParser();
  OptionParser(const OptionParser&) = delete;
  OptionParser& operator=(const OptionParser&) = delete;

  // The current value of `*value` is the default. REQUIRES: `value` outlives Parse.
  void Add(std::string_view name, std::string_view help, int* value, IntRange range = {});
  void Add(std::string_view name, std::string_view help, int64_t* value, IntRange range = {});
  void Add(std::string_view name, std::string_view help, std::string* value);
  void Add(std::string_view name, std::string_view help, double* value, RealRange range = {});
  void AddFlag(std::string_view name, std::string_view help, bool* value);
  // Comma-separated.
  void AddList(std::string_view name, std::string_view help, std::vector<std::string>* values);
  void AddChoice(std::string_view name, std::string_view help, std::string* value,
                 std::vector<std::string> choices);
  void AddPositional(std::string_view name, std::string_view help, std::string* value);
  // Marks the option added last as one that must be given.
  void Required();
  // The program needs one of its subcommands.
  void RequireSubcommand();

  // Nothing when the program should go on, else its exit code: 0 after --help and --version, 2
  // after an error, which has been printed.
  std::optional<int> Parse(int argc, const char* const* argv);
  // After Parse: whether this subcommand was chosen.
  bool Chosen() const;
  // `name=value` of every option, for the start-up log. Secrets (names with "key") are left out.
  std::string Summary() const;

 private:
  CLI::Option* Finish(CLI::Option* option, std::string_view name);

  std::unique_ptr<CLI::App> owned_;
  CLI::App* app_;
  CLI::Option* last_ = nullptr;
};

}  // namespace tandem
