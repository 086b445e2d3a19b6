#include "gpu_worker/backend_sim/sim_resident_experts.h"

#include <algorithm>
#include <limits>

#include "common/base/status.h"

namespace tandem::gpu {

absl::StatusOr<std::unique_ptr<SimResidentExperts>> SimResidentExperts::Create(
    SimDevice& device, Backend& tensors, const ResidentShape& shape) {
  ResidentShape small = shape;
  const auto affordable = shape.budget_bytes / static_cast<uint64_t>(device.shape.expert_bytes());
  small.max_slots = static_cast<int>(
      std::min<uint64_t>(affordable, static_cast<uint64_t>(std::max(shape.max_slots, 0))));
  small.budget_bytes = std::numeric_limits<uint64_t>::max();
  ASSIGN_OR_RETURN(std::unique_ptr<ResidentExperts> made, tensors.MakeResidentExperts(small));
  return std::unique_ptr<SimResidentExperts>(new SimResidentExperts(device, std::move(made)));
}

absl::Status SimResidentExperts::Write(int slot, int layer, const CanonicalExpert& expert) {
  RETURN_IF_ERROR(tensors_->Write(slot, layer, expert));
  const int64_t end_ns = device_.pcie.CopyEndNs(PcieWay::kToDevice, device_.shape.expert_bytes(),
                                                device_.timeline.NowNs());
  device_.timeline.PaceThread(end_ns + device_.LatencyNs());
  return absl::OkStatus();
}

}  // namespace tandem::gpu
