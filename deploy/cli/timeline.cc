#include "deploy/cli/timeline.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem {
namespace {

namespace v1 = trace::v1;

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

const char* CategoryOf(v1::EventRole role) {
  switch (role) {
    case v1::EVENT_ROLE_BUSY:
    case v1::EVENT_ROLE_SEND:
    case v1::EVENT_ROLE_COMPUTE:
      return "busy";
    case v1::EVENT_ROLE_STALL:
    case v1::EVENT_ROLE_COLLECT:
      return "stall";
    case v1::EVENT_ROLE_IDLE:
      return "idle";
    default:
      return "frame";
  }
}

// Step, layer and lane of an event of the link.
using LinkKey = std::array<int64_t, 3>;

std::optional<LinkKey> LinkKeyOf(const v1::TraceEvent& event) {
  if (event.arguments_size() < 3) return std::nullopt;
  return LinkKey{event.arguments(0), event.arguments(1), event.arguments(2)};
}

// A point of the picture that an arrow ends at.
struct Place {
  size_t process = 0;
  size_t track = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

class ChromeWriter {
 public:
  ChromeWriter(const std::vector<ProcessTrace>& processes, std::ostream& out)
      : processes_(processes), out_(out) {
    for (const ProcessTrace& process : processes) {
      base_ns_ = std::min(base_ns_, process.tables.begin_ns() + process.shift_ns);
    }
  }

  void Write() {
    out_ << "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
    for (size_t p = 0; p < processes_.size(); ++p) WriteProcess(p);
    WriteArrows();
    out_ << "\n]}\n";
  }

 private:
  void WriteProcess(size_t p) {
    const ProcessTrace& process = processes_[p];
    const std::string name = absl::StrCat(process.name, " (pid ", process.pid, ")");
    WriteMetadata(p, 0, "process_name", absl::StrCat("\"name\":", Quoted(name)));
    WriteMetadata(p, 0, "process_sort_index", absl::StrCat("\"sort_index\":", p));
    for (size_t t = 0; t < process.events.size(); ++t) {
      if (process.events[t].empty()) continue;
      const std::string& track = process.tables.tracks(static_cast<int>(t)).name();
      WriteMetadata(p, t + 1, "thread_name", absl::StrCat("\"name\":", Quoted(track)));
      WriteMetadata(p, t + 1, "thread_sort_index", absl::StrCat("\"sort_index\":", t));
      for (const v1::TraceEvent& event : process.events[t]) {
        WriteEvent(
            {p, t, event.begin_ns() + process.shift_ns,
             event.begin_ns() + process.shift_ns + static_cast<int64_t>(event.duration_ns())},
            event);
      }
    }
  }

  void WriteMetadata(size_t process, size_t thread, const char* what, const std::string& args) {
    Line(absl::StrCat("\"ph\":\"M\",\"pid\":", process + 1, ",\"tid\":", thread, ",\"name\":\"",
                      what, "\",\"args\":{", args, "}"));
  }

  void WriteEvent(const Place& place, const v1::TraceEvent& event) {
    const v1::EventKind& kind =
        processes_[place.process].tables.kinds(static_cast<int>(event.kind()));
    std::string args;
    for (int i = 0; i < event.arguments_size(); ++i) {
      absl::StrAppend(&args, i == 0 ? "" : ",", Quoted(kind.argument_names(i)), ":",
                      event.arguments(i));
    }
    Line(absl::StrCat("\"ph\":\"X\",", Position(place, place.begin_ns),
                      ",\"dur\":", Microseconds(place.end_ns - place.begin_ns),
                      ",\"name\":", Quoted(kind.name()), ",\"cat\":\"", CategoryOf(kind.role()),
                      "\",\"args\":{", args, "}"));
    if (const auto key = LinkKeyOf(event)) Remember(kind.role(), *key, place);
  }

  // Of several threads that compute one thing, the first is shown.
  void Remember(v1::EventRole role, const LinkKey& key, const Place& place) {
    if (role == v1::EVENT_ROLE_SEND) sends_.try_emplace(key, place);
    if (role == v1::EVENT_ROLE_COLLECT) collects_.try_emplace(key, place);
    if (role == v1::EVENT_ROLE_COMPUTE) computes_[place.process].try_emplace(key, place);
  }

  void WriteArrows() {
    for (const auto& [process, computes] : computes_) {
      for (const auto& [key, compute] : computes) {
        if (const auto send = sends_.find(key); send != sends_.end()) {
          WriteArrow("rows", send->second, send->second.end_ns, compute, compute.begin_ns);
        }
        if (const auto collect = collects_.find(key); collect != collects_.end()) {
          WriteArrow("sums", compute, compute.end_ns, collect->second, collect->second.end_ns);
        }
      }
    }
  }

  void WriteArrow(const char* name, const Place& from, int64_t from_ns, const Place& to,
                  int64_t to_ns) {
    const std::string rest =
        absl::StrCat(",\"cat\":\"link\",\"name\":\"", name, "\",\"id\":", ++arrows_);
    Line(absl::StrCat("\"ph\":\"s\",", Position(from, from_ns), rest));
    Line(absl::StrCat("\"ph\":\"f\",\"bp\":\"e\",", Position(to, to_ns), rest));
  }

  std::string Position(const Place& place, int64_t at_ns) const {
    return absl::StrCat("\"pid\":", place.process + 1, ",\"tid\":", place.track + 1,
                        ",\"ts\":", Microseconds(at_ns - base_ns_));
  }

  static std::string Microseconds(int64_t ns) {
    return absl::StrFormat("%d.%03d", ns / 1000, ns % 1000);
  }

  void Line(const std::string& fields) {
    out_ << (first_ ? "\n{" : ",\n{") << fields << "}";
    first_ = false;
  }

  const std::vector<ProcessTrace>& processes_;
  std::ostream& out_;
  int64_t base_ns_ = std::numeric_limits<int64_t>::max();
  bool first_ = true;
  uint64_t arrows_ = 0;
  std::map<LinkKey, Place> sends_;
  std::map<LinkKey, Place> collects_;
  std::map<size_t, std::map<LinkKey, Place>> computes_;  // by process
};

ProcessShares SharesOf(const ProcessTrace& process, TimelineSummary& summary,
                       std::vector<double>& steps_us) {
  ProcessShares shares;
  shares.name = process.name;
  double busy_ns = 0;
  double stalled_ns = 0;
  for (size_t t = 0; t < process.events.size(); ++t) {
    summary.dropped_events += process.tables.tracks(static_cast<int>(t)).dropped_events();
    summary.events += process.events[t].size();
    bool is_thread = false;
    for (const v1::TraceEvent& event : process.events[t]) {
      const v1::EventRole role = process.tables.kinds(static_cast<int>(event.kind())).role();
      const std::string_view category = CategoryOf(role);
      const auto ns = static_cast<double>(event.duration_ns());
      if (role == v1::EVENT_ROLE_STEP) steps_us.push_back(ns / 1000);
      if (category == "busy") busy_ns += ns;
      if (category == "stall") stalled_ns += ns;
      is_thread |= category != "frame";
    }
    shares.threads += is_thread ? 1 : 0;
  }
  const auto window_ns =
      static_cast<double>(process.tables.end_ns() - process.tables.begin_ns()) * shares.threads;
  if (window_ns > 0) {
    shares.busy = busy_ns / window_ns;
    shares.stalled = stalled_ns / window_ns;
  }
  return shares;
}

}  // namespace

void WriteChromeTrace(const std::vector<ProcessTrace>& processes, std::ostream& out) {
  ChromeWriter(processes, out).Write();
}

TimelineSummary Summarize(const std::vector<ProcessTrace>& processes) {
  TimelineSummary summary;
  std::vector<double> steps_us;
  for (const ProcessTrace& process : processes) {
    summary.processes.push_back(SharesOf(process, summary, steps_us));
    summary.clock_error_ns = std::max(summary.clock_error_ns, process.clock_error_ns);
  }
  summary.steps = steps_us.size();
  if (!steps_us.empty()) {
    const auto middle = steps_us.begin() + static_cast<int64_t>(steps_us.size() / 2);
    std::nth_element(steps_us.begin(), middle, steps_us.end());
    summary.median_step_us = *middle;
  }
  return summary;
}

std::string FormatSummary(const TimelineSummary& summary) {
  std::string text = absl::StrCat(summary.steps, " steps");
  if (summary.steps > 0) absl::StrAppendFormat(&text, ", median %.1f us", summary.median_step_us);
  absl::StrAppend(&text, "; ", summary.events, " events\n");
  absl::StrAppendFormat(&text, "%-18s %7s  %6s  %6s  %13s\n", "", "threads", "busy", "stall",
                        "outside steps");
  for (const ProcessShares& process : summary.processes) {
    absl::StrAppendFormat(&text, "%-18s %7d", process.name, process.threads);
    if (process.threads == 0) {
      absl::StrAppend(&text, "  did nothing\n");
      continue;
    }
    const double rest = std::max(0.0, 1 - process.busy - process.stalled);
    absl::StrAppendFormat(&text, "  %4.1f %%  %4.1f %%  %11.1f %%\n", 100 * process.busy,
                          100 * process.stalled, 100 * rest);
  }
  if (summary.dropped_events > 0) {
    absl::StrAppend(&text, summary.dropped_events,
                    " events did not fit and are missing; trace a shorter time\n");
  }
  if (summary.clock_error_ns > 0) {
    absl::StrAppendFormat(&text,
                          "processes of several machines: their clocks are joined to within "
                          "%.0f us\n",
                          static_cast<double>(summary.clock_error_ns) / 1000);
  }
  return text;
}

}  // namespace tandem
