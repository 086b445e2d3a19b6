#pragma once

// Slots on a simulated device: another backend's hold the small model's experts; budget and
// traffic are those of the described model on the described device.
//
// A Write takes the described expert's bytes across PCIe, where they share the way with what the
// compute stream moves. In wall mode it returns when they are there; in virtual mode, which has no
// time of its own for a copying thread, at once.
//
// Thread safety: as ResidentExperts.

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/backend_sim/sim_device.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::gpu {

class SimResidentExperts final : public ResidentExperts {
 public:
  static absl::StatusOr<std::unique_ptr<SimResidentExperts>> Create(SimDevice& device,
                                                                    Backend& tensors,
                                                                    const ResidentShape& shape);

  int slots() const override { return tensors_->slots(); }
  uint64_t slot_bytes() const override {
    return static_cast<uint64_t>(device_.shape.expert_bytes());
  }
  absl::Status Write(int slot, int layer, const CanonicalExpert& expert) override;

  ResidentExperts& tensors() { return *tensors_; }

 private:
  SimResidentExperts(SimDevice& device, std::unique_ptr<ResidentExperts> tensors)
      : device_(device), tensors_(std::move(tensors)) {}

  SimDevice& device_;
  const std::unique_ptr<ResidentExperts> tensors_;
};

}  // namespace tandem::gpu
