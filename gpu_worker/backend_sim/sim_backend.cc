#include "gpu_worker/backend_sim/sim_backend.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "common/base/check.h"
#include "gpu_worker/backend_sim/sim_resident_experts.h"
#include "gpu_worker/expert_calls.h"

namespace tandem::gpu {
namespace {

const int32_t* CountOf(const BlockCopyArgs&) { return nullptr; }
template <typename Args>
const int32_t* CountOf(const Args& args) {
  return args.rows.count;
}

// A large copy to the device, on the copy stream: returns when its time has come.
void ChargeCopy(SimDevice& device, double bytes) {
  SimTimeline& timeline = device.timeline;
  const int64_t begin_ns = timeline.TimeNs(SimResource::kCopy);
  const int64_t end_ns = device.pcie.CopyEndNs(PcieWay::kToDevice, bytes, begin_ns);
  timeline.Advance(SimResource::kCopy, end_ns + device.LatencyNs() - begin_ns);
  timeline.Pace(SimResource::kCopy);
}

SimResource ResourceOf(Stream stream) {
  return stream == Stream::kCompute ? SimResource::kCompute : SimResource::kCopy;
}

}  // namespace

SimBackend::~SimBackend() {
  device_.timeline.Drain(SimResource::kCompute);
  device_.timeline.Drain(SimResource::kCopy);
}

absl::StatusOr<std::unique_ptr<ResidentExperts>> SimBackend::MakeResidentExperts(
    const ResidentShape& shape) {
  return SimResidentExperts::Create(device_, tensors_, shape);
}

void SimBackend::StreamExperts(const StreamExpertsArgs& args) {
  const std::vector<uint16_t> ids(args.ids, args.ids + args.count);
  device_.timeline.Post(SimResource::kCopy, [this, args, ids] {
    StreamExpertsArgs inner = args;
    inner.experts = &static_cast<SimResidentExperts*>(args.experts)->tensors();
    inner.ids = ids.data();
    *args.begin_ns = device_.timeline.TimeNs(SimResource::kCopy);
    int64_t ignored = 0;
    inner.begin_ns = inner.end_ns = &ignored;
    tensors_.StreamExperts(inner);
    ChargeCopy(device_, device_.shape.expert_bytes() * args.count);
    *args.end_ns = device_.timeline.TimeNs(SimResource::kCopy);
  });
}

void SimBackend::RunResidentExperts(const ResidentExpertsArgs& args) {
  ResidentExpertsArgs inner = args;
  inner.experts = &static_cast<SimResidentExperts*>(args.experts)->tensors();
  Enqueue<&Backend::RunResidentExperts>(inner);
}

void SimBackend::GraphBegin(const GraphKey& key) {
  in_graph_ = true;
  tensors_.GraphBegin(key);
}

void SimBackend::GraphEnd() {
  in_graph_ = false;
  tensors_.GraphEnd();
}

int64_t SimBackend::GapNs() const {
  const SimMachine& machine = device_.machine;
  return static_cast<int64_t>((in_graph_ ? machine.graph_gap_us : machine.launch_gap_us) * 1000);
}

void SimBackend::Charge(const SimOpRecord& record) {
  device_.timeline.Advance(SimResource::kCompute, record.duration_ns);
  device_.log.Add(record);
}

template <auto kOp, typename Args>
void SimBackend::Enqueue(const Args& args) {
  device_.timeline.Post(SimResource::kCompute, [this, args, gap_ns = GapNs()] {
    const OpCost cost = CostOf(device_.shape, args);
    const SimMachine& machine = device_.machine;
    (tensors_.*kOp)(args);
    const int64_t work_ns =
        RoofNs(cost.bytes, machine.gpu_bandwidth_gbps, cost.flops, machine.gpu_tflops);
    Charge({.rows = CountOf(args), .duration_ns = gap_ns + work_ns});
  });
}

absl::Status SimBackend::Synchronize() {
  device_.timeline.Drain(SimResource::kCompute);
  device_.timeline.Drain(SimResource::kCopy);
  LinkError first = LinkError::kNone;
  for (const ExpertLink* link : std::exchange(links_, {})) {
    if (first == LinkError::kNone) first = link->error();
  }
  const absl::Status tensors = tensors_.Synchronize();
  return tensors.ok() ? LinkStatus(first) : tensors;
}

void SimBackend::ChargeTransfer(PcieWay way, size_t bytes, int64_t gap_ns) {
  const int64_t begin_ns = device_.timeline.TimeNs(SimResource::kCompute) + gap_ns;
  const int64_t transfer_ns = device_.pcie.TransferNs(way, static_cast<double>(bytes), begin_ns);
  Charge({.duration_ns = gap_ns + device_.LatencyNs() + transfer_ns});
}

void SimBackend::CopyToDevice(void* device, const void* host, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(host);
  const auto staged = std::make_shared<const std::vector<unsigned char>>(begin, begin + bytes);
  device_.timeline.Post(SimResource::kCompute, [this, device, staged, gap_ns = GapNs()] {
    tensors_.CopyToDevice(device, staged->data(), staged->size());
    ChargeTransfer(PcieWay::kToDevice, staged->size(), gap_ns);
  });
}

void SimBackend::CopyToHost(void* host, const void* device, size_t bytes) {
  device_.timeline.Post(SimResource::kCompute, [this, host, device, bytes, gap_ns = GapNs()] {
    tensors_.CopyToHost(host, device, bytes);
    ChargeTransfer(PcieWay::kToHost, bytes, gap_ns);
  });
}

void SimBackend::CopyRunsToHost(const RunsToHostArgs& args) {
  device_.timeline.Post(SimResource::kCompute, [this, args, gap_ns = GapNs()] {
    tensors_.CopyRunsToHost(args);
    ChargeTransfer(PcieWay::kToHost, args.run_bytes * args.count, gap_ns);
  });
}

void SimBackend::CopyInBackground(void* device, const void* host, size_t bytes,
                                  double charged_bytes) {
  device_.timeline.Post(SimResource::kCopy, [this, device, host, bytes, charged_bytes] {
    ChargeCopy(device_, charged_bytes);
    if (bytes > 0) std::memcpy(device, host, bytes);
  });
}

void SimBackend::RecordEvent(Stream stream, int event) {
  device_.timeline.RecordEvent(ResourceOf(stream), event);
}

void SimBackend::WaitEvent(Stream stream, int event) {
  device_.timeline.WaitEvent(ResourceOf(stream), event);
}

void SimBackend::Stamp(int64_t* device_ns) {
  device_.timeline.Post(SimResource::kCompute, [this, device_ns, gap_ns = GapNs()] {
    Charge({.kind = SimOpRecord::Kind::kStamp, .duration_ns = gap_ns});
    *device_ns = device_.timeline.TimeNs(SimResource::kCompute);
  });
}

void SimBackend::ExpertSubmit(const ExpertSubmitArgs& args) {
  TANDEM_CHECK(args.link->threads() == 1);
  TANDEM_DCHECK(args.x.ld == args.link->limits().hidden);
  if (std::find(links_.begin(), links_.end(), args.link) == links_.end()) {
    links_.push_back(args.link);
  }
  device_.timeline.Post(SimResource::kCompute, [this, args, gap_ns = GapNs()] {
    Charge({.rows = args.rows.count, .duration_ns = gap_ns});
    const Submission submission = SubmissionOf(args);
    args.link->Submit(submission, 0, 1);
  });
}

void SimBackend::ExpertWait(const ExpertWaitArgs& args) {
  TANDEM_DCHECK(args.out.ld == args.link->limits().hidden);
  device_.timeline.Post(SimResource::kCompute, [this, args, gap_ns = GapNs()] {
    Charge({.rows = args.rows.count, .duration_ns = gap_ns});
    const Collection collection = CollectionOf(args);
    args.link->Release(0);
    args.link->Wait(collection, 0, 1);
  });
}

}  // namespace tandem::gpu
