#pragma once

// The timeline of several processes: as a Chrome trace (JSON, which ui.perfetto.dev and
// chrome://tracing open) and as a summary of who was busy.
//
// Format: "Trace Event Format",
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU Not thread-safe.
// Times: nanoseconds of one clock (ours), whichever host an event comes from.

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "tandem/trace/v1/trace.pb.h"

namespace tandem {

// What one process has recorded. Indices of its events are within `tables`.
struct ProcessTrace {
  std::string name;  // "expert_worker.0"
  uint32_t pid = 0;
  // What is added to its times to make them ours: 0 for processes of this machine.
  int64_t shift_ns = 0;
  // How wrong the shift may be.
  int64_t clock_error_ns = 0;
  trace::v1::TraceTables tables;
  std::vector<std::vector<trace::v1::TraceEvent>> events;  // by track
};

// Arrows join what the gpu worker hands to the experts with its computation, and that with the
// wait for it.
void WriteChromeTrace(const std::vector<ProcessTrace>& processes, std::ostream& out);

// How the time of a process's threads was spent, as shares of the recording.
struct ProcessShares {
  std::string name;
  int threads = 0;  // those that have recorded what they did
  double busy = 0;
  double stalled = 0;  // waiting for another side in the middle of a step
};

struct TimelineSummary {
  uint64_t events = 0;
  uint64_t dropped_events = 0;
  uint64_t steps = 0;
  double median_step_us = 0;
  int64_t clock_error_ns = 0;  // largest of a process
  std::vector<ProcessShares> processes;
};

TimelineSummary Summarize(const std::vector<ProcessTrace>& processes);
// Several lines.
std::string FormatSummary(const TimelineSummary& summary);

}  // namespace tandem
