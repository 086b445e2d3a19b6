#include "common/rpc/trace_service.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/rpc/rpc_status.h"

namespace tandem {
namespace {

namespace v1 = trace::v1;

// A ring holds what a thread records in that time at 330,000 events a second; each drain is a
// wake-up that the measured threads may feel.
constexpr std::chrono::milliseconds kDrainInterval{50};
// Some 100 KB a message, far below gRPC's limit of 4 MB.
constexpr size_t kEventsOfChunk = 4096;

v1::EventRole ToProto(TraceRole role) {
  return static_cast<v1::EventRole>(static_cast<int>(role) + v1::EVENT_ROLE_FRAME);
}
static_assert(static_cast<int>(TraceRole::kFrame) == 0 &&
              static_cast<int>(TraceRole::kCollect) ==
                  v1::EVENT_ROLE_COLLECT - v1::EVENT_ROLE_FRAME);

// The tables of a log; kinds are numbered in the order in which they come.
class Tables {
 public:
  explicit Tables(const TraceLog& log) {
    tables_.set_begin_ns(log.begin_ns);
    tables_.set_end_ns(log.end_ns);
    for (const TraceLog::Track& track : log.tracks) {
      v1::Track& added = *tables_.add_tracks();
      added.set_name(track.name);
      added.set_dropped_events(track.dropped);
      for (const TraceEvent& event : track.events) AddKind(event.kind);
    }
  }

  const v1::TraceTables& proto() const { return tables_; }
  uint32_t IndexOf(const TraceKind* kind) const { return kinds_.at(kind); }

 private:
  void AddKind(const TraceKind* kind) {
    if (!kinds_.try_emplace(kind, tables_.kinds_size()).second) return;
    v1::EventKind& added = *tables_.add_kinds();
    added.set_name(kind->name);
    added.set_role(ToProto(kind->role));
    for (const char* name : kind->args) {
      if (name == nullptr) break;
      added.add_argument_names(name);
    }
  }

  v1::TraceTables tables_;
  std::unordered_map<const TraceKind*, uint32_t> kinds_;
};

void AddEvent(const TraceEvent& event, uint32_t kind, v1::TraceEvents& chunk) {
  v1::TraceEvent& added = *chunk.add_events();
  added.set_kind(kind);
  added.set_begin_ns(event.begin_ns);
  added.set_duration_ns(static_cast<uint64_t>(std::max<int64_t>(0, event.end_ns - event.begin_ns)));
  const int64_t values[] = {event.args.a, event.args.b, event.args.c, event.args.d};
  for (size_t i = 0; i < std::size(values) && event.kind->args[i] != nullptr; ++i) {
    added.add_arguments(values[i]);
  }
}

// False: the caller has left.
bool Send(const TraceLog& log, grpc::ServerWriter<v1::TraceResponse>* writer) {
  const Tables tables(log);
  v1::TraceResponse response;
  *response.mutable_tables() = tables.proto();
  if (!writer->Write(response)) return false;
  for (size_t t = 0; t < log.tracks.size(); ++t) {
    const std::vector<TraceEvent>& events = log.tracks[t].events;
    for (size_t begin = 0; begin < events.size(); begin += kEventsOfChunk) {
      const size_t end = std::min(events.size(), begin + kEventsOfChunk);
      v1::TraceEvents& chunk = *response.mutable_events();
      chunk.Clear();
      chunk.set_track(static_cast<uint32_t>(t));
      for (size_t i = begin; i < end; ++i) {
        AddEvent(events[i], tables.IndexOf(events[i].kind), chunk);
      }
      if (!writer->Write(response)) return false;
    }
  }
  return true;
}

}  // namespace

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

TraceService::TraceService(std::string service, Tracer* tracer)
    : service_(std::move(service)), tracer_(tracer) {}

v1::TraceStart TraceService::MakeStart() const {
  v1::TraceStart start;
  start.set_service(service_);
  start.set_pid(static_cast<uint32_t>(getpid()));
  start.set_boot_id(BootId());
  start.set_now_ns(TraceNowNs());
  return start;
}

grpc::Status TraceService::Trace(grpc::ServerContext* context, const v1::TraceRequest* request,
                                 grpc::ServerWriter<v1::TraceResponse>* writer) {
  const uint32_t duration_ms = request->duration_ms();
  if (duration_ms < 1 || duration_ms > kMaxTraceMs) {
    return ToGrpc(absl::InvalidArgumentError(
        absl::StrCat("duration_ms is ", duration_ms, ", not 1 to ", kMaxTraceMs)));
  }
  if (const absl::Status status = tracer_->Start(); !status.ok()) return ToGrpc(status);
  absl::Cleanup stop = [this] { tracer_->Stop(); };
  v1::TraceResponse response;
  *response.mutable_start() = MakeStart();
  if (!writer->Write(response)) return {grpc::StatusCode::CANCELLED, "the caller has left"};
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + std::chrono::milliseconds(duration_ms);
  while (Clock::now() < end) {
    std::this_thread::sleep_until(std::min(end, Clock::now() + kDrainInterval));
    if (context->IsCancelled()) return {grpc::StatusCode::CANCELLED, "the caller has left"};
    tracer_->Drain();
  }
  std::move(stop).Cancel();
  if (!Send(tracer_->Stop(), writer)) return {grpc::StatusCode::CANCELLED, "the caller has left"};
  return grpc::Status::OK;
}

}  // namespace tandem
