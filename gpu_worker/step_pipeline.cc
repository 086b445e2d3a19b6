#include "gpu_worker/step_pipeline.h"

#include <algorithm>
#include <bit>

#include "common/base/check.h"
#include "common/base/log.h"

namespace tandem::gpu {
namespace {

std::vector<int> LayersOf(const std::vector<RouterPicks>& picks) {
  std::vector<int> layers;
  for (const RouterPicks& layer : picks) layers.push_back(layer.layer);
  return layers;
}

PlannerOptions PlannerOptionsOf(const PipelineOptions& options, int top_k, bool overlaps) {
  PlannerOptions out;
  out.mode = options.mode;
  out.may_defer = options.defers();
  out.defer_prefill = options.defer_prefill;
  out.overlaps = overlaps;
  if (out.may_defer && top_k > 0) {
    out.deferrable = std::min<double>(static_cast<double>(options.deferral.max_deferred) / top_k,
                                      options.deferral.max_mass);
  }
  out.measure_every = options.measure_every;
  return out;
}

}  // namespace

int StepPipeline::BufferRows(const Limits& limits) {
  // A decode step's lanes have bounds of powers of two, so that there are few graphs.
  const auto sequences = static_cast<unsigned>(std::max(limits.max_sequences, 1));
  return std::max(limits.max_rows, 2 * static_cast<int>(std::bit_ceil(sequences)));
}

StepPipeline::StepPipeline(const PipelineOptions& options, const Limits& limits,
                           const Decoder& decoder)
    : options_(options), limits_(limits), decoder_(decoder), meter_(LayersOf(decoder.picks())) {
  if (decoder.options().split.any()) {
    sums_.Create(decoder.picks().size(), static_cast<size_t>(decoder.options().buffer_rows));
  }
  set_link(nullptr);
}

void StepPipeline::set_link(const ExpertLink* link) {
  const bool overlaps = link != nullptr && link->overlaps();
  const bool same =
      planner_ != nullptr && link_ != nullptr && link != nullptr && link_->overlaps() == overlaps;
  link_ = link;
  // What was learned holds as long as the kind of link is the same.
  if (!same) {
    planner_ =
        std::make_unique<PipelinePlanner>(PlannerOptionsOf(options_, limits_.top_k, overlaps));
  }
}

void StepPipeline::Choose(StepPlan& plan, StepBuffers& buffers) {
  shape_ = {.rows = plan.rows(), .decode_rows = plan.decode_rows()};
  graph_ = plan.is_decode();
  if (link_ == nullptr) {
    choice_ = {};
  } else {
    choice_ = planner_->Choose(shape_);
  }
  choice_.measured |= traced_;
  buffers.deferral[0] = Defers(choice_.policy) ? options_.deferral : DeferralLimits{};
  if (LanesOf(choice_.policy) == 1) {
    bounds_ = {graph_ ? BucketOf(plan.rows(), limits_.max_rows) : plan.rows(), 0};
    return;
  }
  const int first = choice_.first_lane_rows;
  const int second = plan.rows() - first;
  const int most = limits_.max_rows;
  bounds_ = {graph_ ? BucketOf(first, most) : first, graph_ ? BucketOf(second, most) : second};
  plan.SplitLanes(first, bounds_[0], buffers);
}

void StepPipeline::Upload(Backend& backend, const StepBuffers& buffers,
                          const StepPlan& plan) const {
  if (!decoder_.options().split.deferral) return;
  buffers.deferral.Upload(backend, 1);
  buffers.may_defer.Upload(backend, static_cast<size_t>(plan.extent()));
}

StepInputs StepPipeline::Inputs(const StepBuffers& buffers) const {
  StepInputs inputs;
  inputs.lanes = LanesOf(choice_.policy);
  for (int i = 0; i < inputs.lanes; ++i) {
    const auto lane = static_cast<size_t>(i);
    inputs.lane[lane] = {.rows = {.bound = bounds_[lane], .count = buffers.row_count.device() + i},
                         .first_row = i == 0 ? 0 : bounds_[0]};
  }
  inputs.ids = buffers.ids.device();
  if (decoder_.options().split.deferral) {
    inputs.limits = buffers.deferral.device();
    inputs.may_defer = buffers.may_defer.device();
  }
  if (choice_.measured) inputs.stamps = buffers.stamps.device();
  inputs.traced = traced_;
  return inputs;
}

GraphKey StepPipeline::graph_key() const {
  return {.bucket = bounds_[0],
          .second_bucket = bounds_[1],
          .measured = choice_.measured,
          .traced = traced_};
}

void StepPipeline::Download(Backend& backend, StepBuffers& buffers, const StepPlan& plan) {
  if (choice_.measured) {
    const auto lanes = static_cast<size_t>(LanesOf(choice_.policy));
    buffers.stamps.Download(backend, lanes * decoder_.picks().size());
  }
  if (traced_) buffers.step_stamps.Download(backend, 1);
  if (sums_.layers() > 0) {
    sums_.Download(backend, decoder_.picks()[0].sums, static_cast<size_t>(plan.extent()));
  }
}

void StepPipeline::Observe(const StepPlan& plan, const StepBuffers& buffers, int64_t step_ns) {
  times_ = {};
  if (link_ != nullptr && choice_.measured) {
    times_ = meter_.Measure(buffers.stamps.host(), *link_, LanesOf(choice_.policy));
    ++counters_.measured_steps;
  }
  times_.step_ns = step_ns;
  ++counters_.steps[static_cast<size_t>(choice_.policy)];
  CountPicks(plan);
  if (link_ == nullptr) return;
  planner_->Observe(shape_, choice_, times_);
  LogSwitch();
}

void StepPipeline::CountPicks(const StepPlan& plan) {
  for (size_t layer = 0; layer < sums_.layers(); ++layer) {
    for (int row = 0; row < plan.rows(); ++row) {
      const PickSums& sums = sums_[layer][static_cast<size_t>(plan.place_of(row))];
      counters_.deferred_mass += double{sums.deferred_mass};
      counters_.deferred_picks += sums.deferred;
      counters_.resident_picks += sums.resident;
    }
    counters_.routed_rows += static_cast<uint64_t>(plan.rows());
  }
}

void StepPipeline::LogSwitch() {
  const PipelinePlanner::Switch change = planner_->TakeSwitch();
  if (!change.happened) return;
  const char* unit = change.shape.decode() ? "step" : "row";
  LogInfo("pipeline", {{"policy", StepPolicyName(change.to)},
                       {"instead_of", StepPolicyName(change.from)},
                       {"rows", LogValue(change.shape.rows)},
                       {"decode_rows", LogValue(change.shape.decode_rows)},
                       {"us", LogValue(change.to_ns / 1000)},
                       {"us_before", LogValue(change.from_ns / 1000)},
                       {"of", unit}});
}

void StepPipeline::Report(uint64_t target_us, worker::v1::StepTiming& timing) const {
  const auto us = [](int64_t ns) { return static_cast<uint64_t>(ns / 1000); };
  timing.set_expert_wait_us(us(times_.handover_ns + times_.device_stall_ns));
  timing.set_measured(times_.measured);
  timing.set_device_us(us(times_.before_ns + times_.beside_ns));
  timing.set_experts_us(us(times_.experts_ns + times_.deferred_ns));
  timing.set_experts_stall_us(us(times_.experts_stall_ns));
  timing.set_policy(StepPolicyName(choice_.policy));
  timing.set_advised_prefill_rows(
      target_us == 0 ? 0
                     : static_cast<uint32_t>(planner_->AdvisedPrefillRows(
                           shape_.decode_rows, static_cast<int64_t>(target_us) * 1000)));
}

}  // namespace tandem::gpu
