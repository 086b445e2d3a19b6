#pragma once

// `tandem pack`: writes a model's packed experts to the state directory ahead of the first start.
// The expert worker next to this program does it, since packing is its own.

#include <string>
#include <vector>

#include "common/base/options.h"

namespace tandem {

struct PackOptions {
  std::string model;  // the shipped model by default
  std::string state_dir;
  int threads = 0;
  std::string log_level = "info";

  PackOptions();
  void Register(OptionParser& parser);
};

// The command line of the worker in `program_dir`.
std::vector<std::string> PackArguments(const PackOptions& options, const std::string& program_dir);

// Becomes the worker; returns an exit code only when that fails.
int RunPack(const PackOptions& options);

}  // namespace tandem
