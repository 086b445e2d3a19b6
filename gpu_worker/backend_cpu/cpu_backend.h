#pragma once

// The Backend that executes every op on CPU cores as it is enqueued: device memory is host memory,
// streams, events and graphs mean nothing. Linears run on the packed kernels of
// expert_worker/kernels, all threads belong to one pinned pool (expert_worker/engine/pool.h).
//
// Results depend on a row's own inputs only, not on rows, threads, batch, chunking or the block
// table; every kernel table gives the same bits. Ops do not allocate.
//
// Thread safety: one thread calls the backend, always the same one if the caller is pinned.
// Ownership: memory of Allocate lives as long as the backend; weights are the caller's.
// Links: an op's ExpertLink must have been made for threads() threads and outlive the next
// Synchronize. Synchronize reports a link's error of the current step (UNAVAILABLE when the expert
// worker is gone, INTERNAL otherwise); Begin- and EndStep are the step's owner's.

#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "gpu_worker/backend.h"
#include "gpu_worker/backend_cpu/memory.h"
#include "gpu_worker/backend_cpu/op_context.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::gpu {

struct CpuBackendOptions {
  int threads = 1;
  std::vector<int> cpus;  // empty: not pinned; else one a thread
  bool pin_caller = false;
  std::chrono::microseconds spin{200};
  const kernels::KernelTable* kernels = nullptr;  // kernels::SelectKernelTable(...)
  // Bounds of every op, by which scratch is sized.
  int max_rows = 0;
  int64_t max_vocab = 0;
  int max_experts = 0;
};

class CpuBackend : public Backend {
 public:
  // REQUIRES: options.threads >= 1; options.kernels is not null.
  explicit CpuBackend(const CpuBackendOptions& options);
  ~CpuBackend() override;

  int threads() const { return context_.pool.threads(); }
  const expert::Pool& pool() const { return context_.pool; }

  absl::StatusOr<void*> Allocate(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<LinearWeight>> LoadLinear(const MatrixSource& source) override;
  absl::StatusOr<std::unique_ptr<ResidentExperts>> MakeResidentExperts(
      const ResidentShape& shape) override;

  void GraphBegin(const GraphKey& key) override;
  void GraphEnd() override;
  absl::Status Synchronize() override;

  void CopyToDevice(void* device, const void* host, size_t bytes) override;
  void CopyToHost(void* host, const void* device, size_t bytes) override;
  void CopyRunsToHost(const RunsToHostArgs& args) override;
  void RecordEvent(Stream stream, int event) override;
  void WaitEvent(Stream stream, int event) override;
  void Stamp(int64_t* device_ns) override;

  void Embed(const EmbedArgs& args) override;
  void RmsNorm(const RmsNormArgs& args) override;
  void Linear(const LinearArgs& args) override;
  void HeadLinear(const HeadLinearArgs& args) override;
  void RopeAngles(const RopeAnglesArgs& args) override;
  void Rope(const RopeArgs& args) override;
  void CacheWrite(const CacheWriteArgs& args) override;
  void Attention(const AttentionArgs& args) override;
  void LatentAttention(const LatentAttentionArgs& args) override;
  void SiluMul(const SiluMulArgs& args) override;
  void Add(const AddArgs& args) override;
  void Router(const RouterArgs& args) override;
  void SplitPicks(const SplitPicksArgs& args) override;
  void ExpertSubmit(const ExpertSubmitArgs& args) override;
  void ExpertWait(const ExpertWaitArgs& args) override;
  void StreamExperts(const StreamExpertsArgs& args) override;
  void RunResidentExperts(const ResidentExpertsArgs& args) override;
  void GatherRows(const GatherRowsArgs& args) override;
  void Sample(const SampleArgs& args) override;
  void Logprobs(const LogprobsArgs& args) override;
  void CopyBlocks(const BlockCopyArgs& args) override;

 private:
  static constexpr size_t kMaxLinks = 16;

  OpContext context_;
  std::vector<PageBuffer> buffers_;
  // Links used since the last Synchronize.
  std::array<ExpertLink*, kMaxLinks> links_{};
  size_t link_count_ = 0;
  // Of StreamExperts.
  CanonicalExpert streamed_;
  absl::Status stream_error_;  // the first since the last Synchronize
};

}  // namespace tandem::gpu
