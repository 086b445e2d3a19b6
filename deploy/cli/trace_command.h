#pragma once

// `tandem trace`: records what all processes of a running server do for some seconds, and writes it
// as one timeline.

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/options.h"
#include "deploy/cli/timeline.h"

namespace tandem {

struct TraceOptions {
  double seconds = 2;
  std::string out = "tandem-trace.json";
  std::string run_dir;                 // of the server; empty: the one that runs
  std::vector<std::string> addresses;  // control services; empty: those in run_dir

  void Register(OptionParser& parser);
};

// Records `addresses` at once for `duration_ms`. Of processes of other machines the clock is joined
// with ours by the middle of a call. `on_recording` is called once all of them record, on some
// thread. An error of one ends all; it names the address.
absl::StatusOr<std::vector<ProcessTrace>> RecordTimeline(
    const std::vector<std::string>& addresses, uint32_t duration_ms,
    const std::function<void()>& on_recording = {});

int RunTrace(const TraceOptions& options);

}  // namespace tandem
