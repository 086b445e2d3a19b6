#include "deploy/cli/pack_command.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "deploy/cli/exit_code.h"
#include "deploy/cli/serve_options.h"

namespace tandem {

PackOptions::PackOptions() {
  const ServeOptions defaults;
  model = defaults.model;
  state_dir = defaults.state_dir;
}

void PackOptions::Register(OptionParser& parser) {
  parser.Add("model", "Model directory", &model);
  parser.Add("state-dir", "Where the packed weights go; `tandem serve` finds them there",
             &state_dir);
  parser.Add("threads", "Threads; 0: one a CPU", &threads, {.min = 0, .max = 512});
  parser.AddChoice("log-level", "Least severe log lines shown", &log_level,
                   {"debug", "info", "warn", "error"});
}

std::vector<std::string> PackArguments(const PackOptions& options, const std::string& program_dir) {
  return {absl::StrCat(program_dir, "/tandem-expert-worker"),
          "--pack-only",
          absl::StrCat("--model=", options.model),
          absl::StrCat("--state-dir=", options.state_dir),
          absl::StrCat("--threads=", options.threads),
          absl::StrCat("--log-level=", options.log_level)};
}

int RunPack(const PackOptions& options) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::string> arguments = PackArguments(options, self.parent_path().string());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  return PrintRefusal(
      absl::FailedPreconditionError(absl::StrCat(arguments[0], ": ", std::strerror(errno))));
}

}  // namespace tandem
