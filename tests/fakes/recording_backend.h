#pragma once

// A Backend that writes down which ops were enqueued, with every argument that is fixed at enqueue:
// host bounds, shapes, constants and device addresses (what a CUDA graph would hold), never what
// the addresses hold. Two steps that give equal lists could replay one captured graph. With a
// backend to forward to, ops are executed as well.
//
// Without one, Allocate gives zeroed host memory, LoadLinear the shape alone, and copies are done.
// Thread safety: none. Ownership: borrows `forward`, owns its list and its own allocations.

#include <memory>
#include <string>
#include <vector>

#include "gpu_worker/backend.h"

namespace tandem::gpu {

struct RecordedOp {
  std::string name;
  std::string args;       // "bound=8 x=0x7f... ld=64 ..."
  bool in_graph = false;  // between GraphBegin and GraphEnd

  bool operator==(const RecordedOp&) const = default;
};

// One op a line, for failure messages.
std::string FormatOps(const std::vector<RecordedOp>& ops);

class RecordingBackend : public Backend {
 public:
  explicit RecordingBackend(Backend* forward = nullptr);
  ~RecordingBackend() override;

  // Since the last TakeOps; GraphBegin and GraphEnd are in the list.
  std::vector<RecordedOp> TakeOps();
  // The ops of `ops` that lie between GraphBegin and GraphEnd.
  static std::vector<RecordedOp> GraphOps(const std::vector<RecordedOp>& ops);

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
  void Record(std::string name, std::string args);

  Backend* const forward_;
  std::vector<std::unique_ptr<unsigned char[]>> memory_;
  std::vector<RecordedOp> ops_;
  bool in_graph_ = false;
};

}  // namespace tandem::gpu
