#include "deploy/cli/quantize_command.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/signals.h"
#include "common/base/status.h"
#include "common/model/memory_plan.h"
#include "common/quantize/quantize_checkpoint.h"
#include "deploy/cli/exit_code.h"
#include "deploy/cli/serve_options.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLineInterval(10);

// A bar that is drawn over on a terminal, a line every ten seconds elsewhere.
class ProgressBar {
 public:
  void Show(uint64_t done, uint64_t total) {
    const int percent = total == 0 ? 100 : static_cast<int>(100 * done / total);
    if (terminal_) {
      const auto now = Clock::now();
      if (percent == shown_ && now - drawn_ < std::chrono::milliseconds(200)) return;
      drawn_ = now;
      const std::string bar(static_cast<size_t>(percent / 4), '#');
      const double seconds = std::chrono::duration<double>(now - start_).count();
      const double left = done == 0 ? 0 : seconds * static_cast<double>(total - done) / done;
      std::cerr << absl::StrFormat("\r\033[K[%-25s] %3d %%  %s of %s, %.0f s left", bar, percent,
                                   FormatBytes(done), FormatBytes(total), left)
                << std::flush;
      shown_ = percent;
    } else if (const auto now = Clock::now(); now - drawn_ >= kLineInterval) {
      drawn_ = now;
      std::cerr << absl::StrCat("quantized ", percent, " % of ", FormatBytes(total), "\n");
    }
  }

  void Clear() const {
    if (terminal_) std::cerr << "\r\033[K" << std::flush;
  }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = start_;
  int shown_ = -1;
};

bool IsStopRequested() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGINT) == 1 || sigismember(&pending, SIGTERM) == 1;
}

std::string Describe(const QuantizeReport& report) {
  const double share = static_cast<double>(report.matrix_bytes_after) /
                       static_cast<double>(report.matrix_bytes_before);
  return absl::StrFormat(
      "matrices   %d, %s -> %s (%.1f %%)\n"
      "error      %.4f of the weights' root mean square; worst %.4f in %s\n"
      "weights    %s in all\n",
      report.matrices, FormatBytes(report.matrix_bytes_before),
      FormatBytes(report.matrix_bytes_after), 100 * share, report.loss.Relative(),
      report.worst_loss, report.worst_matrix, FormatBytes(report.weight_bytes));
}

}  // namespace

QuantizeOptions::QuantizeOptions() : model(ServeOptions().model) {}

void QuantizeOptions::Register(OptionParser& parser) {
  parser.Add("model", "Model directory with F32, F16, BF16 or FP8 weights", &model);
  parser.Add("output", "Directory to make", &output);
  parser.Required();
  parser.AddChoice("format", "What the weights become", &format,
                   {"int8", "int4", "int4-asym", "fp8", "mxfp4"});
  parser.AddChoice("group",
                   "Inputs that share a scale; auto: 32 for 4 bits, channel for 8; block: 128x128",
                   &group, {"auto", "32", "64", "128", "channel", "block"});
  parser.AddChoice("scope", "Routed experts, or all linears of the layers but routers", &scope,
                   {"experts", "linears"});
  parser.AddFlag("overwrite", "Replace an output directory that holds a model", &overwrite);
}

absl::StatusOr<EncodeTarget> ParseTarget(const std::string& format, const std::string& group) {
  const bool grouped = group == "32" || group == "64" || group == "128";
  const uint32_t columns = grouped ? static_cast<uint32_t>(std::stoul(group)) : 0;
  const absl::Status refused =
      absl::InvalidArgumentError(absl::StrCat("--format=", format, " has no --group=", group));
  if (format == "fp8") {
    if (grouped) return refused;
    if (group == "block") return EncodeTarget{WeightFormat::kFp8, 128, 128};
    return EncodeTarget{WeightFormat::kFp8, 0, 1};
  }
  if (group == "block") return refused;
  if (format == "int8") return EncodeTarget{WeightFormat::kInt8Bf16, columns, 1};
  const uint32_t columns_or_32 = group == "auto" ? 32 : columns;
  if (format == "mxfp4") {
    if (columns_or_32 != 32) return refused;
    return EncodeTarget{WeightFormat::kMxfp4, 32, 1};
  }
  return EncodeTarget{format == "int4" ? WeightFormat::kInt4Bf16 : WeightFormat::kInt4ZeroBf16,
                      columns_or_32, 1};
}

int RunQuantize(const QuantizeOptions& options) {
  const auto target = ParseTarget(options.format, options.group);
  if (!target.ok()) {
    PrintRefusal(target.status());
    return kExitUsage;
  }
  BlockStopSignals();
  QuantizeRequest request;
  request.model_dir = options.model;
  request.output_dir = options.output;
  request.target = *target;
  request.scope = options.scope == "experts" ? QuantizeScope::kExperts : QuantizeScope::kLinears;
  request.overwrite = options.overwrite;
  ProgressBar bar;
  const auto report = QuantizeCheckpoint(request, [&](uint64_t done, uint64_t total) {
    bar.Show(done, total);
    return !IsStopRequested();
  });
  bar.Clear();
  if (!report.ok()) return PrintRefusal(report.status());
  std::cout << Describe(*report) << "written    " << options.output << "\n";
  return kExitOk;
}

}  // namespace tandem
