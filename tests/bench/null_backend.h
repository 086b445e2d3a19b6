#pragma once

// A Backend whose ops take no time, for measuring what surrounds them: memory, copies and the
// experts' link are real, everything else is a call that does nothing. Router picks stay what the
// memory holds (zeros: expert 0), so that a step succeeds.
//
// Thread safety and ownership: those of the backend whose memory it uses.

#include "gpu_worker/backend.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::bench {

class NullBackend final : public gpu::Backend {
 public:
  explicit NullBackend(gpu::Backend& memory) : memory_(memory) {}

  absl::StatusOr<void*> Allocate(size_t bytes) override { return memory_.Allocate(bytes); }
  absl::StatusOr<std::unique_ptr<gpu::LinearWeight>> LoadLinear(
      const gpu::MatrixSource& source) override {
    return memory_.LoadLinear(source);
  }
  absl::StatusOr<std::unique_ptr<gpu::ResidentExperts>> MakeResidentExperts(
      const gpu::ResidentShape& shape) override {
    return memory_.MakeResidentExperts(shape);
  }
  void GraphBegin(const gpu::GraphKey&) override {}
  void GraphEnd() override {}
  absl::Status Synchronize() override { return memory_.Synchronize(); }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    memory_.CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    memory_.CopyToHost(host, device, bytes);
  }
  void CopyRunsToHost(const gpu::RunsToHostArgs& args) override { memory_.CopyRunsToHost(args); }
  void RecordEvent(gpu::Stream, int) override {}
  void WaitEvent(gpu::Stream, int) override {}
  void Stamp(int64_t* device_ns) override { *device_ns = 0; }

  void Embed(const gpu::EmbedArgs&) override {}
  void RmsNorm(const gpu::RmsNormArgs&) override {}
  void Linear(const gpu::LinearArgs&) override {}
  void HeadLinear(const gpu::HeadLinearArgs&) override {}
  void RopeAngles(const gpu::RopeAnglesArgs&) override {}
  void Rope(const gpu::RopeArgs&) override {}
  void CacheWrite(const gpu::CacheWriteArgs&) override {}
  void Attention(const gpu::AttentionArgs&) override {}
  void LatentAttention(const gpu::LatentAttentionArgs&) override {}
  void SiluMul(const gpu::SiluMulArgs&) override {}
  void Add(const gpu::AddArgs&) override {}
  void Router(const gpu::RouterArgs&) override {}
  void SplitPicks(const gpu::SplitPicksArgs&) override {}
  void ExpertSubmit(const gpu::ExpertSubmitArgs& args) override { memory_.ExpertSubmit(args); }
  void ExpertWait(const gpu::ExpertWaitArgs& args) override { memory_.ExpertWait(args); }
  void StreamExperts(const gpu::StreamExpertsArgs&) override {}
  void RunResidentExperts(const gpu::ResidentExpertsArgs&) override {}
  void GatherRows(const gpu::GatherRowsArgs&) override {}
  void Sample(const gpu::SampleArgs&) override {}
  void Logprobs(const gpu::LogprobsArgs&) override {}
  void CopyBlocks(const gpu::BlockCopyArgs&) override {}

 private:
  gpu::Backend& memory_;
};

}  // namespace tandem::bench
