#include "expert_worker/engine/fast_block.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/base/status.h"
#include "expert_worker/kernels/packed_matrix.h"

namespace tandem::expert {
namespace {

using kernels::FormatKernels;
using kernels::kPanelWidth;
using kernels::kStepAlign;
using kernels::RoundUpTo;

constexpr size_t kLine = kernels::kPackAlignment;
// Segments whose down is multiplied at once where an expert has kJointRows rows or more: a panel's
// sums are then read and written once in four segments' inputs, 256 or 512. With fewer rows weights
// are read in the order in which they lie, segment by segment.
constexpr uint32_t kJointSegments = 4;
constexpr uint32_t kJointRows = 3;
// Columns of a row that are put into form at a time: 1 KiB of floats on the stack.
constexpr uint32_t kPrepareColumns = 256;

size_t L2Bytes() {
  constexpr long kUsual = 1 << 20;
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return static_cast<size_t>(bytes > 0 ? bytes : kUsual);
}

// The fused plan is some 5 % faster per row, but every thread clears, fills and reduces sums of its
// own. It is taken
//   - up to sums of one and a half L2 caches (with 1 MiB and hidden 2048: 192 rows), and beyond
//   - where that work, some 12 bytes a row and hidden column at 10 GB/s, is at most 5 % of a
//     thread's products, top_k * 6 * intermediate operations a row and hidden column at 300 GOP/s,
//     shared by all threads: 60 * threads <= 0.05 * top_k * intermediate. Then up to 8 MiB of sums.
uint32_t FusedRows(size_t l2_bytes, size_t totals_stride, uint64_t products, int threads) {
  constexpr size_t kMostBytes = size_t{8} << 20;
  const bool cheap = 60 * 20 * static_cast<uint64_t>(threads) <= products;
  const size_t bytes = cheap ? std::max(kMostBytes, l2_bytes * 3 / 2) : l2_bytes * 3 / 2;
  return static_cast<uint32_t>(std::max<size_t>(bytes / (totals_stride * sizeof(float)), 1));
}

}  // namespace

absl::Status FastBlock::Configure(const shm::BatchLimits& limits) {
  const WeightStore& store = *context_.store;
  const StoreManifest& m = store.manifest();
  const size_t picks = size_t{limits.max_rows} * limits.top_k;
  limits_ = limits;
  l2_bytes_ = L2Bytes();
  totals_stride_ = RoundUpTo(m.hidden, 16) + 16;  // rows a power of two apart share cache sets
  const uint32_t fused_rows =
      wanted_fused_rows_ >= 0
          ? static_cast<uint32_t>(wanted_fused_rows_)
          : FusedRows(l2_bytes_, totals_stride_, uint64_t{limits.top_k} * m.intermediate,
                      context_.threads);
  fused_rows_ = std::min(2 * limits.max_rows, fused_rows);
  size_t input_bytes = 0, picks_bytes = 0;
  down_rows_bytes_ = 0;
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (!store.has_layer(layer)) continue;
    const FormatKernels& gate_up = GateUpKernels(layer);
    const FormatKernels& down = DownKernels(layer);
    const uint32_t chunk = FormRows::ChunkColumns(down, m.quantum);
    input_bytes = std::max(
        input_bytes,
        FormRows::Bytes(gate_up, FormRows::ChunkColumns(gate_up, m.hidden), limits.max_rows));
    picks_bytes = std::max(picks_bytes, FormRows::Bytes(down, chunk * store.segments(), picks));
    down_rows_bytes_ =
        std::max(down_rows_bytes_, FormRows::Bytes(down, chunk * kJointSegments, kGateUpRows));
  }
  const size_t floats = size_t{kGateUpRows} * 2 * m.quantum + RoundUpTo(m.quantum, kStepAlign) +
                        fused_rows_ * totals_stride_;
  scratch_bytes_ = RoundUpTo(floats * sizeof(float), kLine) + down_rows_bytes_ + kLine;
  ASSIGN_OR_RETURN(workspace_,
                   PageBuffer::Allocate(input_bytes + picks_bytes +
                                            static_cast<size_t>(context_.threads) * scratch_bytes_,
                                        HugePages::kAuto));
  input_ = static_cast<char*>(workspace_.data());
  picks_ = input_ + input_bytes;
  scratch_ = picks_ + picks_bytes;
  return absl::OkStatus();
}

const FormatKernels& FastBlock::GateUpKernels(uint32_t layer) const {
  return context_.table->format(context_.store->format(layer).gate_up.format);
}

const FormatKernels& FastBlock::DownKernels(uint32_t layer) const {
  return context_.table->format(context_.store->format(layer).down.format);
}

FormRows FastBlock::InputRows(uint32_t layer) const {
  const FormatKernels& kernels = GateUpKernels(layer);
  return FormRows(*context_.table, kernels, FormRows::ChunkColumns(kernels, limits_.hidden),
                  limits_.max_rows, input_);
}

FormRows FastBlock::PickRows(uint32_t layer) const {
  const FormatKernels& kernels = DownKernels(layer);
  const uint32_t chunk = FormRows::ChunkColumns(kernels, context_.store->manifest().quantum);
  return FormRows(*context_.table, kernels, chunk * context_.store->segments(),
                  size_t{limits_.max_rows} * limits_.top_k, picks_);
}

FormRows FastBlock::RunRows(uint32_t layer, const Scratch& scratch) const {
  const FormatKernels& kernels = DownKernels(layer);
  const uint32_t chunk = FormRows::ChunkColumns(kernels, context_.store->manifest().quantum);
  return FormRows(*context_.table, kernels, chunk * kJointSegments, kGateUpRows, scratch.down_rows);
}

FastBlock::Scratch FastBlock::ScratchOf(int thread) const {
  const uint32_t quantum = context_.store->manifest().quantum;
  char* at = scratch_ + static_cast<size_t>(thread) * scratch_bytes_;
  Scratch scratch{};
  scratch.down_rows = at;
  scratch.sums = reinterpret_cast<float*>(at + down_rows_bytes_);
  scratch.activation = scratch.sums + size_t{kGateUpRows} * 2 * quantum;
  scratch.totals = scratch.activation + RoundUpTo(quantum, kStepAlign);
  return scratch;
}

void FastBlock::Begin(const shm::ExpertBatch& batch) {
  segments_.Reset();
  down_.Reset();
  if (context_.groups->picks() == 0) return;
  fused_ = context_.groups->outputs() <= fused_rows_;
  const auto groups = static_cast<uint32_t>(context_.groups->groups().size());
  segments_per_task_ = SegmentsPerTask(*context_.store, batch.layer, groups, context_.threads);
  panels_per_task_ = PanelsPerTask(kernels::PanelCount(batch.hidden), context_.threads);
}

// Shares of all column blocks, not of rows: one row is then shared too.
void FastBlock::Prepare(const shm::ExpertBatch& batch, int thread) const {
  if (context_.store->segments() == 0 || !context_.store->has_layer(batch.layer)) return;
  const FormRows rows = InputRows(batch.layer);
  const uint32_t hidden = batch.hidden;
  const uint32_t blocks = CeilDiv(hidden, kPrepareColumns);
  const Share share = ShareOf(batch.rows * blocks, thread, context_.threads);
  alignas(64) float values[kPrepareColumns];
  for (uint32_t i = share.begin; i < share.end; ++i) {
    const uint32_t row = i / blocks;
    const uint32_t column = i % blocks * kPrepareColumns;
    const uint32_t width = std::min(kPrepareColumns, hidden - column);
    const auto padded = static_cast<uint32_t>(
        rows.form() == kernels::ActivationForm::kF32 ? width : RoundUpTo(width, kStepAlign));
    const auto* x = static_cast<const uint16_t*>(batch.x) + size_t{row} * hidden + column;
    if (rows.form() == kernels::ActivationForm::kBf16) {
      uint16_t* to = rows.bf16_row(row) + column;
      std::memcpy(to, x, width * sizeof(uint16_t));
      std::memset(to + width, 0, (padded - width) * sizeof(uint16_t));
      continue;
    }
    context_.table->widen_bf16(x, values, width);
    std::fill(values + width, values + padded, 0.0f);
    rows.Store(row, column, values, padded);
  }
}

void FastBlock::Run(const shm::ExpertBatch& batch, int thread) {
  if (fused_) {
    RunFused(batch, thread);
  } else {
    RunTiled(batch, thread);
  }
}

template <typename Fn>
void FastBlock::ForEachRun(const shm::ExpertBatch& batch, Fn run) {
  const auto groups = context_.groups->groups();
  const uint32_t segments = context_.store->segments();
  const uint32_t tasks_per_group = CeilDiv(segments, segments_per_task_);
  const auto tasks = static_cast<uint32_t>(groups.size()) * tasks_per_group;
  const auto weights_of = [&](uint32_t task) -> const void* {
    if (task >= tasks) return nullptr;
    const uint32_t expert = groups[task / tasks_per_group].expert;
    return context_.store->GateUp(batch.layer, expert, task % tasks_per_group * segments_per_task_)
        .data;
  };
  for (uint32_t task = segments_.Claim(); task < tasks; task = segments_.Claim()) {
    const BatchGroups::Group& group = groups[task / tasks_per_group];
    const uint32_t first = task % tasks_per_group * segments_per_task_;
    const uint32_t last = std::min(segments, first + segments_per_task_);
    const uint32_t step = group.count < kJointRows ? 1 : kJointSegments;
    for (uint32_t s = first; s < last; s += step) {
      const uint32_t count = std::min(step, last - s);
      // Threads take turns, more or less.
      const void* next = s + count < last
                             ? context_.store->GateUp(batch.layer, group.expert, s + count).data
                             : weights_of(task + static_cast<uint32_t>(context_.threads));
      run(group, SegmentRange{s, s + count}, next);
    }
    shm::Tick(batch);
  }
}

// Gate and up of a block of rows, then activation times routing weight, into rows from `first_row`
// on of `to`.
void FastBlock::ActivateInto(uint32_t layer, const RowBlock& block, uint32_t segment,
                             const void* next, const Scratch& scratch, const FormRows& to,
                             size_t first_row, uint32_t column) const {
  const WeightStore& store = *context_.store;
  const uint32_t width = store.segment_width(segment);
  kernels::GemmCall call{};
  call.rows = block.rows;
  call.x_rows = context_.groups->rows() + block.first;
  InputRows(layer).Fill(0, &call);
  const auto weights = PrepareGateUp(store, layer, block.expert, segment, scratch.sums, &call);
  call.next = next;
  GateUpKernels(layer).gemm(weights, call);
  const uint32_t padded = FormRows::ChunkColumns(DownKernels(layer), store.manifest().quantum);
  const kernels::SwigluClamp clamp = store.manifest().activation();
  float* activation = scratch.activation;
  for (uint32_t r = 0; r < block.rows; ++r) {
    float* sums = scratch.sums + size_t{r} * 2 * width;
    Activate(*context_.table, clamp, sums, width, sums);
    std::fill_n(activation, padded, 0.0f);
    context_.table->add_scaled(context_.groups->weights()[block.first + r], sums, activation,
                               width);
    to.Store(first_row + r, column, activation, padded);
  }
}

void FastBlock::AddDownBias(uint32_t layer, const BatchGroups::Group& group, uint32_t column,
                            uint32_t columns, float* y, size_t y_stride) const {
  const float* bias = context_.store->DownBias(layer, group.expert);
  for (uint32_t i = group.begin; bias != nullptr && i < group.begin + group.count; ++i) {
    context_.table->add_scaled(context_.groups->weights()[i], bias + column,
                               y + context_.groups->targets()[i] * y_stride, columns);
  }
}

void FastBlock::RunFused(const shm::ExpertBatch& batch, int thread) {
  const Scratch scratch = ScratchOf(thread);
  std::memset(scratch.totals, 0, context_.groups->outputs() * totals_stride_ * sizeof(float));
  ForEachRun(batch, [&](const BatchGroups::Group& group, SegmentRange run, const void* next) {
    RunFusedSegments(batch.layer, group, run, next, scratch);
    if (run.begin != 0) return;
    AddDownBias(batch.layer, group, 0, batch.hidden, scratch.totals, totals_stride_);
  });
  context_.Wait();
  Reduce(batch, thread);
}

void FastBlock::RunFusedSegments(uint32_t layer, const BatchGroups::Group& group, SegmentRange run,
                                 const void* next, const Scratch& scratch) const {
  const WeightStore& store = *context_.store;
  const FormRows rows = RunRows(layer, scratch);
  const uint32_t chunk = FormRows::ChunkColumns(DownKernels(layer), store.manifest().quantum);
  const auto down = store.DownSegments(layer, group.expert, run.begin, run.size());
  for (uint32_t done = 0; done < group.count; done += kGateUpRows) {
    const RowBlock block{group.expert, group.begin + done,
                         std::min(kGateUpRows, group.count - done)};
    const bool last = done + block.rows == group.count;
    for (uint32_t s = run.begin; s < run.end; ++s) {
      const void* then =
          s + 1 < run.end ? store.GateUp(layer, group.expert, s + 1).data : down.data;
      ActivateInto(layer, block, s, then, scratch, rows, 0, (s - run.begin) * chunk);
    }
    kernels::GemmCall call{};
    call.next = last ? next : store.GateUp(layer, group.expert, run.begin).data;
    rows.Fill(0, &call);
    call.rows = block.rows;
    call.y = scratch.totals;
    call.y_stride = totals_stride_;
    call.y_rows = context_.groups->targets() + block.first;
    call.panel_end = kernels::PanelCount(down.n);
    call.accumulate = true;
    DownKernels(layer).gemm(down, call);
  }
}

// Columns of all threads' sums, in cache lines of 16.
void FastBlock::Reduce(const shm::ExpertBatch& batch, int thread) const {
  const Share lines = ShareOf(CeilDiv(batch.hidden, 16), thread, context_.threads);
  const uint32_t column = lines.begin * 16;
  const uint32_t end = std::min(batch.hidden, lines.end * 16);
  if (column >= end) return;
  for (uint32_t row = 0; row < context_.groups->outputs(); ++row) {
    float* out = batch.out + size_t{row} * batch.hidden + column;
    const size_t from = row * totals_stride_ + column;
    std::memcpy(out, ScratchOf(0).totals + from, (end - column) * sizeof(float));
    for (int t = 1; t < context_.threads; ++t) {
      context_.table->add_scaled(1.0f, ScratchOf(t).totals + from, out, end - column);
    }
  }
}

void FastBlock::RunTiled(const shm::ExpertBatch& batch, int thread) {
  const Scratch scratch = ScratchOf(thread);
  const FormRows picks = PickRows(batch.layer);
  ForEachRun(batch, [&](const BatchGroups::Group& group, SegmentRange run, const void* next) {
    for (uint32_t s = run.begin; s < run.end; ++s) {
      const void* then =
          s + 1 < run.end ? context_.store->GateUp(batch.layer, group.expert, s + 1).data : next;
      RunTiledGateUp(batch.layer, group, s, then, scratch, picks);
    }
  });
  context_.Wait();
  const uint32_t tasks = CeilDiv(kernels::PanelCount(batch.hidden), panels_per_task_);
  for (uint32_t task = down_.Claim(); task < tasks; task = down_.Claim()) {
    RunTiledDown(batch, task, picks);
    shm::Tick(batch);
  }
}

void FastBlock::RunTiledGateUp(uint32_t layer, const BatchGroups::Group& group, uint32_t segment,
                               const void* next, const Scratch& scratch,
                               const FormRows& picks) const {
  const uint32_t column =
      segment * FormRows::ChunkColumns(DownKernels(layer), context_.store->manifest().quantum);
  for (uint32_t done = 0; done < group.count; done += kGateUpRows) {
    const RowBlock block{group.expert, group.begin + done,
                         std::min(kGateUpRows, group.count - done)};
    const bool last = done + block.rows == group.count;
    ActivateInto(layer, block, segment, last ? next : nullptr, scratch, picks, block.first, column);
  }
}

// Rows of one expert in blocks whose activations take half the L2 cache.
void FastBlock::RunTiledDown(const shm::ExpertBatch& batch, uint32_t task,
                             const FormRows& picks) const {
  const WeightStore& store = *context_.store;
  kernels::GemmCall call{};
  call.panel_begin = task * panels_per_task_;
  call.panel_end = std::min(kernels::PanelCount(batch.hidden), call.panel_begin + panels_per_task_);
  const uint32_t column = call.panel_begin * kPanelWidth;
  const uint32_t columns = std::min(batch.hidden, call.panel_end * kPanelWidth) - column;
  call.y = batch.out + column;
  call.y_stride = batch.hidden;
  call.accumulate = true;
  for (uint32_t row = 0; row < context_.groups->outputs(); ++row) {
    std::memset(call.y + size_t{row} * batch.hidden, 0, columns * sizeof(float));
  }
  const auto block = static_cast<uint32_t>(std::max<size_t>(l2_bytes_ / 2 / picks.row_bytes(), 32));
  const auto groups = context_.groups->groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const BatchGroups::Group& group = groups[g];
    const auto down = store.Down(batch.layer, group.expert);
    const char* next = nullptr;
    if (g + 1 < groups.size()) {
      next = static_cast<const char*>(store.Down(batch.layer, groups[g + 1].expert).data) +
             call.panel_begin * down.panel_stride_bytes;
    }
    for (uint32_t done = 0; done < group.count; done += block) {
      call.rows = std::min(block, group.count - done);
      call.next = done + call.rows == group.count ? next : nullptr;
      call.y_rows = context_.groups->targets() + group.begin + done;
      picks.Fill(group.begin + done, &call);
      DownKernels(batch.layer).gemm(down, call);
    }
    AddDownBias(batch.layer, group, column, columns, call.y, call.y_stride);
  }
}

}  // namespace tandem::expert
