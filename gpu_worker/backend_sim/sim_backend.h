#pragma once

// A Backend for a GPU that is not here: another Backend (the CPU's) computes the tensors of a small
// model, and each op lasts as long as the described GPU would need for the described model: a
// launch gap, then the larger of bytes / bandwidth and operations / peak (op_cost.h). Streams,
// events and the order of ops are those of a device: ops are enqueued and execute later (wall
// mode), with the row counts that device memory holds then.
//
// Stamp gives the timeline's time. Between GraphBegin and GraphEnd the gap is that of a replayed
// graph. CopyToDevice takes its bytes at once, as CUDA does of pageable memory; CopyToHost's arrive
// by the next Synchronize, which waits for both streams but not for experts' deferred work.
//
// Thread safety: one thread enqueues. Ownership: borrows device and tensors. `tensors` is called on
// the device's threads, one at a time. Links must be made for one thread. Errors: those of links.

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu_worker/backend.h"
#include "gpu_worker/backend_sim/op_cost.h"
#include "gpu_worker/backend_sim/sim_device.h"

namespace tandem::gpu {

class SimBackend final : public Backend {
 public:
  SimBackend(SimDevice& device, Backend& tensors) : device_(device), tensors_(tensors) {}
  ~SimBackend() override;

  absl::StatusOr<void*> Allocate(size_t bytes) override { return tensors_.Allocate(bytes); }
  absl::StatusOr<std::unique_ptr<LinearWeight>> LoadLinear(const MatrixSource& source) override {
    return tensors_.LoadLinear(source);
  }

  // The budget is of the described device, for experts of the described model. A slot's Write takes
  // its bytes across PCIe beside the streams, as a copying thread of its own does.
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
  // A large copy in the background: `bytes` are moved, and `charged_bytes` of the big model's cost
  // bandwidth of PCIe. `host` must stay as it is until the copy is done.
  void CopyInBackground(void* device, const void* host, size_t bytes, double charged_bytes);

  void Embed(const EmbedArgs& args) override { Enqueue<&Backend::Embed>(args); }
  void RmsNorm(const RmsNormArgs& args) override { Enqueue<&Backend::RmsNorm>(args); }
  void Linear(const LinearArgs& args) override { Enqueue<&Backend::Linear>(args); }
  void HeadLinear(const HeadLinearArgs& args) override { Enqueue<&Backend::HeadLinear>(args); }
  void RopeAngles(const RopeAnglesArgs& args) override { Enqueue<&Backend::RopeAngles>(args); }
  void Rope(const RopeArgs& args) override { Enqueue<&Backend::Rope>(args); }
  void CacheWrite(const CacheWriteArgs& args) override { Enqueue<&Backend::CacheWrite>(args); }
  void Attention(const AttentionArgs& args) override { Enqueue<&Backend::Attention>(args); }
  void LatentAttention(const LatentAttentionArgs& args) override {
    Enqueue<&Backend::LatentAttention>(args);
  }
  void SiluMul(const SiluMulArgs& args) override { Enqueue<&Backend::SiluMul>(args); }
  void Add(const AddArgs& args) override { Enqueue<&Backend::Add>(args); }
  void Router(const RouterArgs& args) override { Enqueue<&Backend::Router>(args); }
  void SplitPicks(const SplitPicksArgs& args) override { Enqueue<&Backend::SplitPicks>(args); }
  void ExpertSubmit(const ExpertSubmitArgs& args) override;
  void ExpertWait(const ExpertWaitArgs& args) override;
  void StreamExperts(const StreamExpertsArgs& args) override;
  void RunResidentExperts(const ResidentExpertsArgs& args) override;
  void GatherRows(const GatherRowsArgs& args) override { Enqueue<&Backend::GatherRows>(args); }
  void Sample(const SampleArgs& args) override { Enqueue<&Backend::Sample>(args); }
  void Logprobs(const LogprobsArgs& args) override { Enqueue<&Backend::Logprobs>(args); }
  void CopyBlocks(const BlockCopyArgs& args) override { Enqueue<&Backend::CopyBlocks>(args); }

 private:
  template <auto kOp, typename Args>
  void Enqueue(const Args& args);
  int64_t GapNs() const;
  // On the compute stream.
  void Charge(const SimOpRecord& record);
  void ChargeTransfer(PcieWay way, size_t bytes, int64_t gap_ns);

  SimDevice& device_;
  Backend& tensors_;
  bool in_graph_ = false;
  std::vector<ExpertLink*> links_;  // used since the last Synchronize
};

}  // namespace tandem::gpu
