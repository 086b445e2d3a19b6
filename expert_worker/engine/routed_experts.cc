#include "expert_worker/engine/routed_experts.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "expert_worker/kernels/packed_matrix.h"

namespace tandem::expert {
namespace {

using kernels::kPanelWidth;

constexpr uint32_t kSkipped = 0xFFFFFFFF;
// Rows that gate and up are computed for at a time: 48 x 128 sums are 24 KiB, which stay in L1
// until the activation has read them.
constexpr uint32_t kGateUpRows = 48;
// A task's weights: large enough that claiming (some 50 ns) vanishes beside reading them (5 us),
// small enough that the last tasks of a layer end together.
constexpr uint64_t kTaskBytes = 64 * 1024;
constexpr uint32_t kMaxPanelsPerTask = 16;

constexpr uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

struct Share {
  uint32_t begin;
  uint32_t end;
};

Share ShareOf(uint32_t count, int thread, int threads) {
  const uint64_t n = count;
  return {static_cast<uint32_t>(n * thread / threads),
          static_cast<uint32_t>(n * (thread + 1) / threads)};
}

}  // namespace

RoutedExperts::RoutedExperts(const WeightStore* store, const kernels::KernelTable* table,
                             const Options& options)
    : store_(store),
      table_(table),
      kernels_(table->format(store->format())),
      threads_(options.threads),
      spin_(options.spin),
      barrier_(options.threads) {}

absl::Status RoutedExperts::Configure(const shm::BatchLimits& limits) {
  const StoreManifest& m = store_->manifest();
  if (limits.hidden != m.hidden || limits.num_experts != m.experts ||
      limits.num_layers != m.layers) {
    return absl::FailedPreconditionError(
        absl::StrCat("the link is for hidden ", limits.hidden, ", ", limits.num_experts,
                     " experts, ", limits.num_layers, " layers; the loaded model has ", m.hidden,
                     ", ", m.experts, ", ", m.layers));
  }
  if (limits.top_k == 0 || limits.top_k > m.experts) {
    return absl::FailedPreconditionError(
        absl::StrCat("top_k ", limits.top_k, " of ", m.experts, " experts"));
  }
  const size_t picks = size_t{limits.max_rows} * limits.top_k;
  x_stride_ = kernels::ActivationStride(m.hidden);
  act_stride_ = kernels::ActivationStride(std::max(store_->width(), 1u));
  scratch_floats_ = std::max({size_t{kGateUpRows} * 2 * m.quantum, 2 * picks * kPanelWidth,
                              size_t{64} * kMaxPanelsPerTask * kPanelWidth});
  const size_t x_floats = limits.max_rows * x_stride_;
  const size_t act_floats = picks * act_stride_;
  const size_t floats = x_floats + act_floats + static_cast<size_t>(threads_) * scratch_floats_;
  ASSIGN_OR_RETURN(workspace_,
                   PageBuffer::Allocate((floats + 1) * sizeof(float), HugePages::kAuto));
  workspace_bytes_.store(workspace_.bytes(), std::memory_order_relaxed);
  x_ = static_cast<float*>(workspace_.data());
  act_ = x_ + x_floats;
  scratch_ = act_ + act_floats;
  counts_.assign(m.experts + 1, 0);
  rows_.assign(picks, 0);
  position_.assign(picks, 0);
  groups_.assign(m.experts, Group{});
  limits_ = limits;
  return absl::OkStatus();
}

void RoutedExperts::Run(const shm::ExpertBatch& batch, int thread, int threads) {
  TANDEM_DCHECK(threads == threads_);
  TANDEM_DCHECK(batch.rows <= limits_.max_rows && batch.top_k <= limits_.top_k);
  if (batch.rows == 0) return;
  if (thread == 0) PlanBatch(batch);
  WidenRows(batch, thread);
  if (threads > 1) barrier_.Wait(spin_);
  if (group_count_ == 0) {
    ZeroRows(batch, thread);
    return;
  }
  RunGateUp(batch, thread);
  if (threads > 1) barrier_.Wait(spin_);
  RunDown(batch, thread);
}

// A counting sort of the picks by expert; rows stay in order within an expert.
void RoutedExperts::PlanBatch(const shm::ExpertBatch& batch) {
  const uint32_t experts = store_->manifest().experts;
  const uint32_t picks = batch.rows * batch.top_k;
  group_count_ = 0;
  picks_ = 0;
  next_gate_up_.store(0, std::memory_order_relaxed);
  next_down_.store(0, std::memory_order_relaxed);
  if (store_->segments() == 0 || !store_->has_layer(batch.layer)) return;
  std::fill(counts_.begin(), counts_.end(), 0);
  for (uint32_t i = 0; i < picks; ++i) {
    if (batch.ids[i] < experts) ++counts_[batch.ids[i]];
  }
  for (uint32_t e = 0; e < experts; ++e) {
    const uint32_t count = counts_[e];
    counts_[e] = picks_;  // from here on: where the expert's next pick goes
    if (count == 0) continue;
    groups_[group_count_++] = {e, picks_, count};
    picks_ += count;
  }
  if (picks_ == 0) return;
  for (uint32_t i = 0; i < picks; ++i) {
    const uint16_t expert = batch.ids[i];
    if (expert >= experts) {
      position_[i] = kSkipped;
      continue;
    }
    position_[i] = counts_[expert]++;
    rows_[position_[i]] = i / batch.top_k;
  }
  const uint64_t segment_bytes = std::max<uint64_t>(store_->manifest().down_offset, 1);
  segments_per_task_ = static_cast<uint32_t>(
      std::clamp<uint64_t>(kTaskBytes / segment_bytes, 1, store_->segments()));
  // Enough tasks that threads end together; with many picks fewer panels, for the scratch's sake.
  const uint32_t panels = kernels::PanelCount(batch.hidden);
  const uint32_t fit = static_cast<uint32_t>(scratch_floats_ / (size_t{picks_} * kPanelWidth));
  const uint32_t wanted = panels / (4 * static_cast<uint32_t>(threads_));
  panels_per_task_ = std::clamp(std::min(wanted, fit), 1u, kMaxPanelsPerTask);
}

void RoutedExperts::WidenRows(const shm::ExpertBatch& batch, int thread) {
  // Shares of all elements, not of rows: one row is then shared too.
  const uint32_t hidden = batch.hidden;
  const uint32_t blocks = CeilDiv(hidden, 64);
  const Share share = ShareOf(batch.rows * blocks, thread, threads_);
  for (uint32_t i = share.begin; i < share.end; ++i) {
    const uint32_t row = i / blocks;
    const uint32_t column = i % blocks * 64;
    const uint32_t width = std::min(64u, hidden - column);
    const size_t from = size_t{row} * hidden + column;
    float* to = x_ + row * x_stride_ + column;
    if (batch.row_type == shm::RowType::kBf16) {
      table_->widen_bf16(static_cast<const uint16_t*>(batch.x) + from, to, width);
    } else {
      std::memcpy(to, static_cast<const float*>(batch.x) + from, width * sizeof(float));
    }
  }
}

float* RoutedExperts::Scratch(int thread) const {
  return scratch_ + static_cast<size_t>(thread) * scratch_floats_;
}

void RoutedExperts::RunGateUp(const shm::ExpertBatch& batch, int thread) {
  const uint32_t segments = store_->segments();
  const uint32_t tasks_per_group = CeilDiv(segments, segments_per_task_);
  const uint32_t tasks = group_count_ * tasks_per_group;
  while (true) {
    const uint32_t task = next_gate_up_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return;
    const Group& group = groups_[task / tasks_per_group];
    const uint32_t first = task % tasks_per_group * segments_per_task_;
    const uint32_t last = std::min(segments, first + segments_per_task_);
    for (uint32_t s = first; s < last; ++s) RunGateUpTask(batch.layer, group, s, Scratch(thread));
    shm::Tick(batch);
  }
}

void RoutedExperts::RunGateUpTask(uint32_t layer, const Group& group, uint32_t segment,
                                  float* scratch) {
  const kernels::PackedMatrix weights = store_->GateUp(layer, group.expert, segment);
  const uint32_t width = store_->segment_width(segment);
  kernels::GemmCall call{};
  call.x = x_;
  call.x_stride = x_stride_;
  call.y = scratch;
  call.y_stride = 2 * width;
  call.panel_end = kernels::PanelCount(weights.n);
  for (uint32_t done = 0; done < group.count; done += kGateUpRows) {
    const uint32_t first = group.begin + done;
    call.rows = std::min(kGateUpRows, group.count - done);
    call.x_rows = rows_.data() + first;
    kernels_.gemm_exact(weights, call);
    for (uint32_t r = 0; r < call.rows; ++r) {
      const float* gate = scratch + size_t{r} * 2 * width;
      float* act = act_ + (first + r) * act_stride_ + segment * store_->manifest().quantum;
      table_->silu_mul(gate, gate + width, act, width);
    }
  }
}

void RoutedExperts::RunDown(const shm::ExpertBatch& batch, int thread) {
  const uint32_t panels = kernels::PanelCount(batch.hidden);
  const uint32_t tasks = CeilDiv(panels, panels_per_task_);
  const uint32_t stride = panels_per_task_ * kPanelWidth;
  float* outputs = Scratch(thread);  // [picks, stride]
  kernels::GemmCall call{};
  call.x_stride = act_stride_;
  call.y_stride = stride;
  while (true) {
    const uint32_t task = next_down_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return;
    call.panel_begin = task * panels_per_task_;
    call.panel_end = std::min(panels, call.panel_begin + panels_per_task_);
    for (uint32_t g = 0; g < group_count_; ++g) {
      const Group& group = groups_[g];
      call.x = act_ + group.begin * act_stride_;
      call.y = outputs + size_t{group.begin} * stride;
      call.rows = group.count;
      kernels_.gemm_exact(store_->Down(batch.layer, group.expert), call);
    }
    const uint32_t column = call.panel_begin * kPanelWidth;
    const uint32_t columns = std::min(batch.hidden, call.panel_end * kPanelWidth) - column;
    SumPicks(batch, outputs, column, columns, stride);
    shm::Tick(batch);
  }
}

// The order of a row's picks is the order of the sum.
void RoutedExperts::SumPicks(const shm::ExpertBatch& batch, const float* outputs, uint32_t column,
                             uint32_t columns, uint32_t stride) const {
  for (uint32_t row = 0; row < batch.rows; ++row) {
    float* out = batch.out + size_t{row} * batch.hidden + column;
    std::memset(out, 0, columns * sizeof(float));
    for (uint32_t i = row * batch.top_k; i < (row + 1) * batch.top_k; ++i) {
      if (position_[i] == kSkipped) continue;
      table_->add_scaled(batch.weights[i], outputs + size_t{position_[i]} * stride, out, columns);
    }
  }
}

void RoutedExperts::ZeroRows(const shm::ExpertBatch& batch, int thread) const {
  const Share share = ShareOf(batch.rows, thread, threads_);
  std::memset(batch.out + size_t{share.begin} * batch.hidden, 0,
              size_t{share.end - share.begin} * batch.hidden * sizeof(float));
}

}  // namespace tandem::expert
