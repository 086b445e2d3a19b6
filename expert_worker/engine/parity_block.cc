#include "expert_worker/engine/parity_block.h"

#include <algorithm>
#include <cstring>

#include "common/base/status.h"
#include "expert_worker/kernels/packed_matrix.h"

namespace tandem::expert {

using kernels::kPanelWidth;

absl::Status ParityBlock::Configure(const shm::BatchLimits& limits) {
  const StoreManifest& m = context_.store->manifest();
  const size_t picks = size_t{limits.max_rows} * limits.top_k;
  x_stride_ = kernels::ActivationStride(m.hidden);
  act_stride_ = kernels::ActivationStride(std::max(context_.store->width(), 1u));
  scratch_floats_ = std::max({size_t{kGateUpRows} * 2 * m.quantum, 2 * picks * kPanelWidth,
                              size_t{64} * kMaxPanelsPerTask * kPanelWidth});
  const size_t x_floats = limits.max_rows * x_stride_;
  const size_t act_floats = picks * act_stride_;
  const size_t floats =
      x_floats + act_floats + static_cast<size_t>(context_.threads) * scratch_floats_;
  ASSIGN_OR_RETURN(workspace_,
                   PageBuffer::Allocate((floats + 1) * sizeof(float), HugePages::kAuto));
  x_ = static_cast<float*>(workspace_.data());
  act_ = x_ + x_floats;
  scratch_ = act_ + act_floats;
  return absl::OkStatus();
}

void ParityBlock::Begin(const shm::ExpertBatch& batch) {
  gate_up_.Reset();
  down_.Reset();
  if (context_.groups->picks() == 0) return;
  segments_per_task_ =
      SegmentsPerTask(*context_.store, batch.layer,
                      static_cast<uint32_t>(context_.groups->groups().size()), context_.threads);
  // With many picks fewer panels, for the scratch's sake.
  const size_t fit = scratch_floats_ / (size_t{context_.groups->picks()} * kPanelWidth);
  const uint32_t panels = kernels::PanelCount(batch.hidden);
  panels_per_task_ =
      static_cast<uint32_t>(std::clamp<size_t>(fit, 1, PanelsPerTask(panels, context_.threads)));
}

void ParityBlock::Prepare(const shm::ExpertBatch& batch, int thread) {
  // Shares of all elements, not of rows: one row is then shared too.
  const uint32_t hidden = batch.hidden;
  const uint32_t blocks = CeilDiv(hidden, 64);
  const Share share = ShareOf(batch.rows * blocks, thread, context_.threads);
  const auto* x = static_cast<const float*>(batch.x);
  for (uint32_t i = share.begin; i < share.end; ++i) {
    const uint32_t row = i / blocks;
    const uint32_t column = i % blocks * 64;
    std::memcpy(x_ + row * x_stride_ + column, x + size_t{row} * hidden + column,
                std::min(64u, hidden - column) * sizeof(float));
  }
}

void ParityBlock::Run(const shm::ExpertBatch& batch, int thread) {
  RunGateUp(batch, thread);
  context_.Wait();
  RunDown(batch, thread);
}

void ParityBlock::RunGateUp(const shm::ExpertBatch& batch, int thread) {
  const auto groups = context_.groups->groups();
  const uint32_t segments = context_.store->segments();
  const uint32_t tasks_per_group = CeilDiv(segments, segments_per_task_);
  const auto tasks = static_cast<uint32_t>(groups.size()) * tasks_per_group;
  float* scratch = scratch_ + static_cast<size_t>(thread) * scratch_floats_;
  for (uint32_t task = gate_up_.Claim(); task < tasks; task = gate_up_.Claim()) {
    const uint32_t first = task % tasks_per_group * segments_per_task_;
    const uint32_t last = std::min(segments, first + segments_per_task_);
    for (uint32_t s = first; s < last; ++s) {
      RunGateUpTask(batch.layer, groups[task / tasks_per_group], s, scratch);
    }
    shm::Tick(batch);
  }
}

void ParityBlock::RunGateUpTask(uint32_t layer, const BatchGroups::Group& group, uint32_t segment,
                                float* scratch) {
  const WeightStore& store = *context_.store;
  const uint32_t width = store.segment_width(segment);
  const auto gemm = context_.table->format(store.format(layer).gate_up.format).gemm_exact;
  const kernels::SwigluClamp clamp = store.manifest().activation();
  for (uint32_t done = 0; done < group.count; done += kGateUpRows) {
    const uint32_t first = group.begin + done;
    kernels::GemmCall call{};
    call.x = x_;
    call.x_stride = x_stride_;
    call.rows = std::min(kGateUpRows, group.count - done);
    call.x_rows = context_.groups->rows() + first;
    const auto weights = PrepareGateUp(store, layer, group.expert, segment, scratch, &call);
    gemm(weights, call);
    for (uint32_t r = 0; r < call.rows; ++r) {
      float* act = act_ + (first + r) * act_stride_ + segment * store.manifest().quantum;
      Activate(*context_.table, clamp, scratch + size_t{r} * 2 * width, width, act);
    }
  }
}

void ParityBlock::RunDown(const shm::ExpertBatch& batch, int thread) {
  const uint32_t tasks = CeilDiv(kernels::PanelCount(batch.hidden), panels_per_task_);
  float* outputs = scratch_ + static_cast<size_t>(thread) * scratch_floats_;
  for (uint32_t task = down_.Claim(); task < tasks; task = down_.Claim()) {
    RunDownTask(batch, task, outputs);
    shm::Tick(batch);
  }
}

// `outputs` is [picks, stride].
void ParityBlock::RunDownTask(const shm::ExpertBatch& batch, uint32_t task, float* outputs) {
  const WeightStore& store = *context_.store;
  const uint32_t stride = panels_per_task_ * kPanelWidth;
  const auto gemm = context_.table->format(store.format(batch.layer).down.format).gemm_exact;
  kernels::GemmCall call{};
  call.x_stride = act_stride_;
  call.y_stride = stride;
  call.panel_begin = task * panels_per_task_;
  call.panel_end = std::min(kernels::PanelCount(batch.hidden), call.panel_begin + panels_per_task_);
  const uint32_t column = call.panel_begin * kPanelWidth;
  const uint32_t columns = std::min(batch.hidden, call.panel_end * kPanelWidth) - column;
  for (const BatchGroups::Group& group : context_.groups->groups()) {
    call.x = act_ + group.begin * act_stride_;
    call.y = outputs + size_t{group.begin} * stride;
    call.rows = group.count;
    const float* bias = store.DownBias(batch.layer, group.expert);
    call.accumulate = bias != nullptr;
    for (uint32_t r = 0; bias != nullptr && r < group.count; ++r) {
      std::memcpy(call.y + size_t{r} * stride, bias + column, columns * sizeof(float));
    }
    gemm(store.Down(batch.layer, group.expert), call);
  }
  SumPicks(batch, outputs, column, columns, stride);
}

// The order of a row's picks is the order of the sum.
void ParityBlock::SumPicks(const shm::ExpertBatch& batch, const float* outputs, uint32_t column,
                           uint32_t columns, uint32_t stride) const {
  for (uint32_t row = 0; row < batch.rows; ++row) {
    float* out = batch.out + size_t{row} * batch.hidden + column;
    std::memset(out, 0, columns * sizeof(float));
    for (uint32_t i = row * batch.top_k; i < (row + 1) * batch.top_k; ++i) {
      const uint32_t position = context_.groups->position(i);
      if (position == BatchGroups::kSkipped) continue;
      context_.table->add_scaled(batch.weights[i], outputs + size_t{position} * stride, out,
                                 columns);
    }
  }
}

}  // namespace tandem::expert
