#pragma once

// Resident experts of the CPU backend: an expert in a slot is its two matrices in the kernels'
// packed layout, each whole. Computed as the CPU experts of parity mode are (exact kernels, the
// same order of sums), so an expert's output has the same bits wherever it lies.

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "expert_worker/engine/batch_groups.h"
#include "expert_worker/engine/block_parts.h"
#include "gpu_worker/backend_cpu/memory.h"
#include "gpu_worker/backend_cpu/op_context.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::gpu::cpu {

class CpuResidentExperts final : public ResidentExperts {
 public:
  static absl::StatusOr<std::unique_ptr<CpuResidentExperts>> Create(const OpContext& context,
                                                                    const ResidentShape& shape);

  int slots() const override { return static_cast<int>(slots_.size()); }
  uint64_t slot_bytes() const override { return slot_bytes_; }
  absl::Status Write(int slot, int layer, const CanonicalExpert& expert) override;

  // The op. One thread.
  void Run(OpContext& context, const ResidentExpertsArgs& args);

 private:
  struct Slot {
    kernels::PackedMatrix gate_up{};
    kernels::PackedMatrix down{};
    const float* gate_up_bias = nullptr;  // null without biases
    const float* down_bias = nullptr;
  };
  // Kernels of a layer's two matrices.
  struct Gemms {
    kernels::GemmFunction gate_up;
    kernels::GemmFunction down;
  };

  explicit CpuResidentExperts(const ResidentShape& shape) : shape_(shape) {}
  absl::Status Allocate(const OpContext& context);
  uint64_t MatrixBytes(bool down) const;
  Gemms GemmsOf(const OpContext& context, int layer) const;
  void RunGateUp(const ResidentExpertsArgs& args, kernels::GemmFunction gemm);
  void RunActivation(const OpContext& context, int thread);
  void RunDown(const OpContext& context, const ResidentExpertsArgs& args,
               kernels::GemmFunction gemm, int thread);
  void AddRows(const OpContext& context, const ResidentExpertsArgs& args, uint32_t panel,
               const float* outputs) const;

  const ResidentShape shape_;
  std::vector<Slot> slots_;
  uint64_t slot_bytes_ = 0;
  uint64_t down_offset_ = 0;  // in a slot
  uint64_t bias_offset_ = 0;
  PageBuffer memory_;
  PageBuffer workspace_;
  size_t sums_stride_ = 0;
  size_t outputs_floats_ = 0;  // of one thread
  float* sums_ = nullptr;      // [max_rows * top_k, sums_stride_]: gate and up, then activations
  float* outputs_ = nullptr;   // [threads, max_rows * top_k, kPanelWidth]
  // Of the op in progress; written before the threads start.
  expert::BatchGroups groups_;
  uint32_t picks_in_batch_ = 0;
  expert::TaskCounter gate_up_;
  expert::TaskCounter down_;
};

void RunResidentExperts(OpContext& context, const ResidentExpertsArgs& args);

}  // namespace tandem::gpu::cpu
