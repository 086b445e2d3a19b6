#include "gpu_worker/backend_cpu/resident_experts.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::gpu::cpu {
namespace {

using expert::BatchGroups;
using kernels::kPanelWidth;
using kernels::PanelCount;

// Panels of gate and up that a thread claims at a time: some 100 KiB of weights.
constexpr uint32_t kPanelsPerTask = 4;

uint64_t PackedBytes(const MatrixFormat& format, int64_t n, int64_t k) {
  const auto rows = static_cast<uint32_t>(n);
  return uint64_t{PanelCount(rows)} *
         kernels::PanelBytes(format.format, static_cast<uint32_t>(k), format.group_columns);
}

kernels::PackedMatrix Pack(const CanonicalMatrix& from, void* to) {
  kernels::PackSource source{};
  source.format = from.format.format;
  source.data = from.elements.data();
  source.row_stride = from.columns;
  source.quantized = from.quantized();
  kernels::PackPanels(source.format, from.format.group_columns, source, from.rows, from.columns,
                      from.columns, to);
  return kernels::MakePackedMatrix(source.format, from.format.group_columns, to, from.rows,
                                   from.columns);
}

bool Matches(const CanonicalMatrix& matrix, const MatrixFormat& format, int64_t n, int64_t k) {
  return matrix.format == format && matrix.rows == n && matrix.columns == k;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CpuResidentExperts>> CpuResidentExperts::Create(
    const OpContext& context, const ResidentShape& shape) {
  TANDEM_CHECK(shape.hidden > 0 && shape.intermediate > 0 && shape.top_k > 0);
  TANDEM_CHECK(shape.formats.size() == shape.has_experts.size());
  std::unique_ptr<CpuResidentExperts> experts(new CpuResidentExperts(shape));
  RETURN_IF_ERROR(experts->Allocate(context));
  return experts;
}

// Of the layer whose format takes most: an expert of any layer fits in any slot.
uint64_t CpuResidentExperts::MatrixBytes(bool down) const {
  uint64_t bytes = 0;
  for (size_t layer = 0; layer < shape_.formats.size(); ++layer) {
    if (shape_.has_experts[layer] == 0) continue;
    const LayerFormat& format = shape_.formats[layer];
    bytes =
        std::max(bytes, down ? PackedBytes(format.down, shape_.hidden, shape_.intermediate)
                             : PackedBytes(format.gate_up, 2 * shape_.intermediate, shape_.hidden));
  }
  return bytes;
}

absl::Status CpuResidentExperts::Allocate(const OpContext& context) {
  const int64_t biases = shape_.biases ? 2 * shape_.intermediate + shape_.hidden : 0;
  down_offset_ = MatrixBytes(false);
  bias_offset_ = down_offset_ + MatrixBytes(true);
  slot_bytes_ = kernels::RoundUpTo(bias_offset_ + static_cast<uint64_t>(biases) * sizeof(float),
                                   kernels::kPackAlignment);
  const uint64_t slots = std::min(shape_.budget_bytes / slot_bytes_,
                                  static_cast<uint64_t>(std::max(shape_.max_slots, 0)));
  TANDEM_CHECK(slots < kNoExpert);
  slots_.resize(slots);
  ASSIGN_OR_RETURN(memory_, PageBuffer::Create(slots * slot_bytes_));
  const auto rows = static_cast<size_t>(context.limits.max_rows);
  const size_t picks = rows * static_cast<size_t>(shape_.top_k);
  sums_stride_ = kernels::ActivationStride(static_cast<size_t>(2 * shape_.intermediate));
  outputs_floats_ = picks * kPanelWidth;
  const size_t floats =
      picks * sums_stride_ + static_cast<size_t>(context.pool.threads()) * outputs_floats_;
  ASSIGN_OR_RETURN(workspace_, PageBuffer::Create(floats * sizeof(float)));
  sums_ = static_cast<float*>(workspace_.data());
  outputs_ = sums_ + picks * sums_stride_;
  groups_.Configure(static_cast<uint32_t>(slots), static_cast<uint32_t>(rows),
                    static_cast<uint32_t>(shape_.top_k));
  return absl::OkStatus();
}

absl::Status CpuResidentExperts::Write(int slot, int layer, const CanonicalExpert& expert) {
  TANDEM_CHECK(slot >= 0 && slot < slots());
  const LayerFormat& format = shape_.formats[static_cast<size_t>(layer)];
  if (!Matches(expert.gate_up, format.gate_up, 2 * shape_.intermediate, shape_.hidden) ||
      !Matches(expert.down, format.down, shape_.hidden, shape_.intermediate) ||
      expert.down_bias.empty() == shape_.biases) {
    return absl::FailedPreconditionError(
        absl::StrCat("an expert of layer ", layer, " has another format or shape than its layer"));
  }
  auto* memory = static_cast<char*>(memory_.data()) + static_cast<uint64_t>(slot) * slot_bytes_;
  Slot& to = slots_[static_cast<size_t>(slot)];
  to.gate_up = Pack(expert.gate_up, memory);
  to.down = Pack(expert.down, memory + down_offset_);
  if (!shape_.biases) return absl::OkStatus();
  auto* bias = reinterpret_cast<float*>(memory + bias_offset_);
  to.gate_up_bias = bias;
  to.down_bias = std::copy(expert.gate_up_bias.begin(), expert.gate_up_bias.end(), bias);
  std::copy(expert.down_bias.begin(), expert.down_bias.end(), bias + 2 * shape_.intermediate);
  return absl::OkStatus();
}

CpuResidentExperts::Gemms CpuResidentExperts::GemmsOf(const OpContext& context, int layer) const {
  const LayerFormat& format = shape_.formats[static_cast<size_t>(layer)];
  return {context.kernels.format(format.gate_up.format).gemm_exact,
          context.kernels.format(format.down.format).gemm_exact};
}

void CpuResidentExperts::Run(OpContext& context, const ResidentExpertsArgs& args) {
  shm::ExpertBatch batch;  // its ids are slots here
  batch.rows = static_cast<uint32_t>(RowCount(args.rows));
  batch.top_k = static_cast<uint32_t>(shape_.top_k);
  batch.ids = args.slots;
  batch.weights = args.weights;
  groups_.Assign(batch, BatchGroups::Part::kImmediate);
  if (groups_.picks() == 0) return;
  picks_in_batch_ = batch.rows * batch.top_k;
  gate_up_.Reset();
  down_.Reset();
  const Gemms gemms = GemmsOf(context, args.layer);
  context.pool.Run([&](int thread) {
    RunGateUp(args, gemms.gate_up);
    context.pool.Barrier();
    RunActivation(context, thread);
    context.pool.Barrier();
    RunDown(context, args, gemms.down, thread);
  });
}

void CpuResidentExperts::RunGateUp(const ResidentExpertsArgs& args, kernels::GemmFunction gemm) {
  const auto groups = groups_.groups();
  const auto outputs = static_cast<uint32_t>(2 * shape_.intermediate);
  const uint32_t tasks_per_group = expert::CeilDiv(PanelCount(outputs), kPanelsPerTask);
  const auto tasks = static_cast<uint32_t>(groups.size()) * tasks_per_group;
  for (uint32_t task = gate_up_.Claim(); task < tasks; task = gate_up_.Claim()) {
    const BatchGroups::Group& group = groups[task / tasks_per_group];
    const Slot& slot = slots_[group.expert];
    kernels::GemmCall call{};
    call.panel_begin = task % tasks_per_group * kPanelsPerTask;
    call.panel_end = std::min(PanelCount(outputs), call.panel_begin + kPanelsPerTask);
    const uint32_t column = call.panel_begin * kPanelWidth;
    const uint32_t columns = std::min(outputs, call.panel_end * kPanelWidth) - column;
    call.x = args.x.data;
    call.x_stride = static_cast<size_t>(args.x.ld);
    call.x_rows = groups_.rows() + group.begin;
    call.rows = group.count;
    call.y = sums_ + group.begin * sums_stride_ + column;
    call.y_stride = sums_stride_;
    call.accumulate = slot.gate_up_bias != nullptr;
    for (uint32_t r = 0; call.accumulate && r < group.count; ++r) {
      std::copy_n(slot.gate_up_bias + column, columns, call.y + r * sums_stride_);
    }
    gemm(slot.gate_up, call);
  }
}

// In place: the sums of gate and up become activations.
void CpuResidentExperts::RunActivation(const OpContext& context, int thread) {
  const kernels::SwigluClamp clamp{shape_.activation_limit, shape_.activation_alpha,
                                   shape_.activation_up_offset};
  const expert::Share share = expert::ShareOf(groups_.picks(), thread, context.pool.threads());
  for (uint32_t i = share.begin; i < share.end; ++i) {
    float* sums = sums_ + i * sums_stride_;
    expert::Activate(context.kernels, clamp, sums, static_cast<uint32_t>(shape_.intermediate),
                     sums);
  }
}

// A panel of outputs of all picks, then of all rows: no two threads add to the same element.
void CpuResidentExperts::RunDown(const OpContext& context, const ResidentExpertsArgs& args,
                                 kernels::GemmFunction gemm, int thread) {
  const auto hidden = static_cast<uint32_t>(shape_.hidden);
  float* outputs = outputs_ + static_cast<size_t>(thread) * outputs_floats_;
  for (uint32_t panel = down_.Claim(); panel < PanelCount(hidden); panel = down_.Claim()) {
    const uint32_t columns = std::min(kPanelWidth, hidden - panel * kPanelWidth);
    for (const BatchGroups::Group& group : groups_.groups()) {
      const Slot& slot = slots_[group.expert];
      kernels::GemmCall call{};
      call.panel_begin = panel;
      call.panel_end = panel + 1;
      call.x = sums_ + group.begin * sums_stride_;
      call.x_stride = sums_stride_;
      call.rows = group.count;
      call.y = outputs + size_t{group.begin} * kPanelWidth;
      call.y_stride = kPanelWidth;
      call.accumulate = slot.down_bias != nullptr;
      for (uint32_t r = 0; call.accumulate && r < group.count; ++r) {
        std::copy_n(slot.down_bias + panel * kPanelWidth, columns, call.y + r * kPanelWidth);
      }
      gemm(slot.down, call);
    }
    AddRows(context, args, panel, outputs);
  }
}

void CpuResidentExperts::AddRows(const OpContext& context, const ResidentExpertsArgs& args,
                                 uint32_t panel, const float* outputs) const {
  const uint32_t column = panel * kPanelWidth;
  const uint32_t columns = std::min(kPanelWidth, static_cast<uint32_t>(shape_.hidden) - column);
  const auto top_k = static_cast<uint32_t>(shape_.top_k);
  alignas(64) float sum[kPanelWidth];
  for (uint32_t first = 0; first < picks_in_batch_; first += top_k) {
    bool any = false;
    for (uint32_t i = first; i < first + top_k; ++i) {
      const uint32_t position = groups_.position(i);
      if (position == BatchGroups::kSkipped) continue;
      if (!any) std::fill_n(sum, columns, 0.0F);
      any = true;
      context.kernels.add_scaled(args.weights[i], outputs + size_t{position} * kPanelWidth, sum,
                                 columns);
    }
    if (!any) continue;
    float* out = args.out.data + static_cast<int64_t>(first / top_k) * args.out.ld + column;
    context.kernels.add_scaled(1.0F, sum, out, columns);
  }
}

void RunResidentExperts(OpContext& context, const ResidentExpertsArgs& args) {
  static_cast<CpuResidentExperts&>(*args.experts).Run(context, args);
}

}  // namespace tandem::gpu::cpu
