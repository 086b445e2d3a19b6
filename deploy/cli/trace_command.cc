#include "deploy/cli/trace_command.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/status.h"
#include "common/base/trace.h"
#include "common/rpc/rpc_status.h"
#include "common/rpc/trace_service.h"
#include "deploy/cli/exit_code.h"
#include "deploy/cli/run_directory.h"
#include "tandem/trace/v1/trace.grpc.pb.h"

namespace tandem {
namespace {

namespace v1 = trace::v1;

// Beyond the recording: a million events take a second or two to send.
constexpr std::chrono::seconds kSendTime{60};

// One process, on a thread of its own.
class Recording {
 public:
  Recording(std::string address, uint32_t duration_ms, std::function<void()> on_start)
      : address_(std::move(address)), duration_ms_(duration_ms), on_start_(std::move(on_start)) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::milliseconds(duration_ms) + kSendTime);
  }

  void Run() { status_ = Annotate(Record(), address_); }
  // Any thread; Run then ends with CANCELLED.
  void Cancel() { context_.TryCancel(); }

  const absl::Status& status() const { return status_; }
  ProcessTrace Take() { return std::move(trace_); }

 private:
  absl::Status Record() {
    const auto stub = v1::TraceService::NewStub(
        grpc::CreateChannel(address_, grpc::InsecureChannelCredentials()));
    v1::TraceRequest request;
    request.set_duration_ms(duration_ms_);
    const int64_t called_ns = TraceNowNs();
    const auto reader = stub->Trace(&context_, request);
    v1::TraceResponse response;
    absl::Status read;
    while (read.ok() && reader->Read(&response)) {
      if (response.has_start()) {
        Start(response.start(), called_ns);
        on_start_();
      }
      if (response.has_tables()) Adopt(std::move(*response.mutable_tables()));
      if (response.has_events()) read = Add(*response.mutable_events());
    }
    if (!read.ok()) context_.TryCancel();
    const absl::Status finished = FromGrpc(reader->Finish());
    return read.ok() ? finished : read;
  }

  void Start(const v1::TraceStart& start, int64_t called_ns) {
    trace_.name = start.service();
    trace_.pid = start.pid();
    if (!start.boot_id().empty() && start.boot_id() == BootId()) return;
    const int64_t answered_ns = TraceNowNs();
    trace_.shift_ns = called_ns + (answered_ns - called_ns) / 2 - start.now_ns();
    trace_.clock_error_ns = (answered_ns - called_ns) / 2;
  }

  void Adopt(v1::TraceTables tables) {
    trace_.events.clear();
    trace_.events.resize(static_cast<size_t>(tables.tracks_size()));
    trace_.tables = std::move(tables);
  }

  absl::Status Add(v1::TraceEvents& chunk) {
    if (chunk.track() >= trace_.events.size()) {
      return absl::DataLossError("events of a track that was not announced");
    }
    std::vector<v1::TraceEvent>& events = trace_.events[chunk.track()];
    for (v1::TraceEvent& event : *chunk.mutable_events()) {
      const auto kinds = static_cast<uint32_t>(trace_.tables.kinds_size());
      if (event.kind() >= kinds ||
          event.arguments_size() !=
              trace_.tables.kinds(static_cast<int>(event.kind())).argument_names_size()) {
        return absl::DataLossError("an event of a kind that was not announced");
      }
      events.push_back(std::move(event));
    }
    return absl::OkStatus();
  }

  const std::string address_;
  const uint32_t duration_ms_;
  const std::function<void()> on_start_;
  grpc::ClientContext context_;
  absl::Status status_;
  ProcessTrace trace_;
};

// "expert_worker.0", "expert_worker.1": processes of one name are numbered.
void NumberNames(std::vector<ProcessTrace>& traces) {
  std::map<std::string, int> counts;
  for (const ProcessTrace& trace : traces) ++counts[trace.name];
  std::map<std::string, int> next;
  for (ProcessTrace& trace : traces) {
    if (counts[trace.name] < 2) continue;
    const int number = next[trace.name]++;
    trace.name = absl::StrCat(trace.name, ".", number);
  }
}

absl::StatusOr<std::vector<std::string>> FindAddresses(const TraceOptions& options) {
  if (!options.addresses.empty()) return options.addresses;
  std::string directory = options.run_dir;
  if (directory.empty()) {
    const std::vector<std::string> live = LiveRunDirectories();
    if (live.empty()) {
      return absl::UnavailableError(
          "no running server of this user was found; start one with `tandem serve`, or name its "
          "processes with --addresses");
    }
    if (live.size() > 1) {
      return absl::FailedPreconditionError(absl::StrCat(
          "several servers run; choose one: --run-dir=", absl::StrJoin(live, " or --run-dir=")));
    }
    directory = live.front();
  }
  std::vector<std::string> addresses = ControlAddresses(directory);
  if (addresses.empty()) {
    return absl::UnavailableError(absl::StrCat(directory, ": no server runs there"));
  }
  return addresses;
}

absl::Status WriteFile(const std::string& path, const std::vector<ProcessTrace>& traces) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (file) WriteChromeTrace(traces, file);
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

// Before anything is recorded: whether the file or its directory can be written.
absl::Status CheckWritable(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const bool writable = access(path.c_str(), F_OK) == 0
                            ? access(path.c_str(), W_OK) == 0
                            : access(parent.empty() ? "." : parent.c_str(), W_OK) == 0;
  if (writable) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("--out=", path, ": cannot be written: ", std::strerror(errno)));
}

absl::Status Trace(const TraceOptions& options, uint32_t duration_ms) {
  RETURN_IF_ERROR(CheckWritable(options.out));
  ASSIGN_OR_RETURN(const std::vector<std::string> addresses, FindAddresses(options));
  const auto say = [&] {
    std::cerr << "recording " << addresses.size() << " processes for " << options.seconds << " s\n"
              << std::flush;
  };
  ASSIGN_OR_RETURN(const std::vector<ProcessTrace> traces,
                   RecordTimeline(addresses, duration_ms, say));
  RETURN_IF_ERROR(WriteFile(options.out, traces));
  std::cout << options.out << ": " << FormatSummary(Summarize(traces))
            << "open it at https://ui.perfetto.dev\n";
  return absl::OkStatus();
}

}  // namespace

void TraceOptions::Register(OptionParser& parser) {
  parser.Add("seconds", "How long to record, at most 60", &seconds);
  parser.Add("out", "File for the timeline: a Chrome trace, which ui.perfetto.dev opens", &out);
  parser.Add("run-dir", "Directory of the server (tandem-run-...); empty: the one that runs",
             &run_dir);
  parser.AddList(
      "addresses",
      "Control services to record in place of those in --run-dir: unix:PATH or HOST:PORT",
      &addresses);
}

absl::StatusOr<std::vector<ProcessTrace>> RecordTimeline(
    const std::vector<std::string>& addresses, uint32_t duration_ms,
    const std::function<void()>& on_recording) {
  std::atomic<size_t> waiting{addresses.size()};
  const auto on_start = [&] {
    if (waiting.fetch_sub(1) == 1 && on_recording) on_recording();
  };
  std::vector<std::unique_ptr<Recording>> recordings;
  for (const std::string& address : addresses) {
    recordings.push_back(std::make_unique<Recording>(address, duration_ms, on_start));
  }
  std::vector<std::thread> threads;
  for (const auto& recording : recordings) {
    threads.emplace_back([&recordings, self = recording.get()] {
      self->Run();
      if (self->status().ok()) return;
      for (const auto& other : recordings) other->Cancel();
    });
  }
  for (std::thread& thread : threads) thread.join();
  absl::Status status;
  std::vector<ProcessTrace> traces;
  for (const auto& recording : recordings) {
    // The first that failed cancelled the others.
    if (status.ok() || absl::IsCancelled(status)) status = recording->status();
    traces.push_back(recording->Take());
  }
  if (!status.ok()) return status;
  NumberNames(traces);
  return traces;
}

int RunTrace(const TraceOptions& options) {
  if (!(options.seconds > 0 && options.seconds * 1000 <= kMaxTraceMs)) {
    std::cerr << "tandem: --seconds must be above 0 and at most " << kMaxTraceMs / 1000 << ", not "
              << options.seconds << "\n";
    return kExitUsage;
  }
  const auto duration_ms = static_cast<uint32_t>(std::ceil(options.seconds * 1000));
  const absl::Status status = Trace(options, duration_ms);
  return status.ok() ? kExitOk : PrintRefusal(status);
}

}  // namespace tandem
