#include "gpu_worker/backend_sim/sim_expert_link.h"

#include <algorithm>

#include "common/base/check.h"

namespace tandem::gpu {
namespace {

using Part = expert::BatchGroups::Part;

constexpr double kRowBytes = 2;           // BF16, an element
constexpr double kSumBytes = 4;           // F32, an element
constexpr double kPickBytes = 2 + 4 + 1;  // expert id, weight, deferred

}  // namespace

SimExpertLink::SimExpertLink(SimDevice& device, ExpertLink& inner)
    : device_(device),
      inner_(inner),
      lanes_(inner.limits().lanes),
      times_(size_t{inner.limits().lanes} * inner.limits().num_layers) {
  TANDEM_CHECK(inner.threads() == 1);
  groups_.Configure(limits().num_experts, limits().max_rows, limits().top_k,
                    expert::BatchGroups::kSharedPicks);
}

SimExpertLink::~SimExpertLink() { device_.timeline.Drain(SimResource::kExperts); }

void SimExpertLink::BeginStep(uint64_t step) {
  begun_step_ = step;
  inner_.BeginStep(step);
}

// A count out of bounds is the inner link's to refuse; nothing is charged for it.
int32_t SimExpertLink::RowsOf(const int32_t* rows, int32_t max_rows) const {
  return *rows < 0 || *rows > max_rows ? 0 : *rows;
}

void SimExpertLink::Submit(const Submission& submission, int thread, int threads) {
  TANDEM_DCHECK(thread == 0 && threads == 1 && submission.lane < lanes_.size());
  static_cast<void>(thread);
  static_cast<void>(threads);
  SimTimeline& timeline = device_.timeline;
  const double bytes = RowsOf(submission.rows, submission.max_rows) *
                       (kRowBytes * device_.shape.big.hidden + kPickBytes * limits().top_k);
  const int64_t transfer_ns =
      device_.pcie.TransferNs(PcieWay::kToHost, bytes, timeline.TimeNs(SimResource::kCompute));
  timeline.Advance(SimResource::kCompute, transfer_ns);
  device_.log.Add(SimOpRecord{.kind = SimOpRecord::Kind::kSubmit,
                              .rows = submission.rows,
                              .lane = submission.lane,
                              .layer = submission.layer,
                              .duration_ns = transfer_ns});
  timeline.Pace(SimResource::kCompute);
  const int64_t arrival_ns = timeline.TimeNs(SimResource::kCompute) + device_.LatencyNs();
  timeline.PostAt(SimResource::kExperts, arrival_ns,
                  [this, submission, step = begun_step_] { Compute(submission, step); });
}

// One expert after the other is copied where any is: what is under way at the beginning is taken to
// go on to the end.
int64_t SimExpertLink::CostNs(const Submission& submission, expert::BatchGroups::Part part,
                              int64_t begin_ns) {
  const SimMachine& machine = device_.machine;
  const shm::ExpertBatch batch{
      .rows = static_cast<uint32_t>(RowsOf(submission.rows, submission.max_rows)),
      .top_k = limits().top_k,
      .ids = submission.ids,
      .weights = submission.weights,
      .deferred = submission.deferred};
  groups_.Assign(batch, part);
  const auto experts = static_cast<double>(groups_.groups().size());
  const double gbps = machine.cpu_bandwidth_gbps - device_.pcie.HostReadGbps(begin_ns);
  return RoofNs(experts * device_.shape.expert_bytes(), gbps,
                groups_.picks() * device_.shape.expert_flops(), machine.cpu_tflops);
}

void SimExpertLink::Compute(const Submission& submission, uint64_t step) {
  SimTimeline& timeline = device_.timeline;
  const int64_t begin_ns = timeline.TimeNs(SimResource::kExperts);
  if (step != active_step_) idle_since_ns_ = begin_ns;  // idle between steps is no stall
  active_step_ = step;
  SimExpertRecord record{
      .lane = submission.lane, .layer = submission.layer, .stall_ns = begin_ns - idle_since_ns_};
  record.immediate_ns = static_cast<int64_t>(device_.machine.submission_us * 1000) +
                        CostNs(submission, Part::kImmediate, begin_ns);
  record.deferred_ns = CostNs(submission, Part::kDeferred, begin_ns);
  device_.log.Add(record);
  const int64_t answer_ns = begin_ns + record.immediate_ns;
  if (submission.layer < limits().num_layers) {
    times_[size_t{submission.lane} * limits().num_layers + submission.layer] = {
        step, {begin_ns, answer_ns, answer_ns + record.deferred_ns}};
  }
  inner_.Submit(submission, 0, 1);
  timeline.Advance(SimResource::kExperts, record.immediate_ns);
  timeline.Pace(SimResource::kExperts);
  Lane& lane = lanes_[submission.lane];
  {
    const std::lock_guard lock(lane.mutex);
    lane.answered = true;
    lane.answer_ns = answer_ns;
  }
  lane.changed.notify_all();
  timeline.Advance(SimResource::kExperts, record.deferred_ns);
  idle_since_ns_ = timeline.TimeNs(SimResource::kExperts);
}

LayerTimes SimExpertLink::layer_times(uint32_t lane, uint32_t layer) const {
  const StepTimes& entry = times_[size_t{lane} * limits().num_layers + layer];
  return entry.step == begun_step_ ? entry.times : LayerTimes{};
}

void SimExpertLink::Wait(const Collection& collection, int thread, int threads) {
  TANDEM_DCHECK(thread == 0 && threads == 1 && collection.lane < lanes_.size());
  static_cast<void>(thread);
  static_cast<void>(threads);
  SimTimeline& timeline = device_.timeline;
  Lane& lane = lanes_[collection.lane];
  const int64_t begin_ns = timeline.TimeNs(SimResource::kCompute);
  {
    std::unique_lock lock(lane.mutex);
    lane.changed.wait(lock, [&] { return lane.answered; });
    lane.answered = false;
    timeline.AdvanceTo(SimResource::kCompute, lane.answer_ns + device_.LatencyNs());
  }
  const int64_t seen_ns = timeline.TimeNs(SimResource::kCompute);
  const double bytes =
      RowsOf(collection.rows, collection.max_rows) * kSumBytes * device_.shape.big.hidden;
  const int64_t transfer_ns = device_.pcie.TransferNs(PcieWay::kToDevice, bytes, seen_ns);
  timeline.Advance(SimResource::kCompute, transfer_ns);
  device_.log.Add(SimOpRecord{.kind = SimOpRecord::Kind::kWait,
                              .rows = collection.rows,
                              .lane = collection.lane,
                              .layer = collection.layer,
                              .duration_ns = transfer_ns,
                              .stall_ns = seen_ns - begin_ns});
  inner_.Wait(collection, 0, 1);
}

}  // namespace tandem::gpu
