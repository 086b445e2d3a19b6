// An ExpertLink that computes in the caller's own threads: Submit runs the BatchHandler at once,
// SPMD on the threads that call it, and Wait hands out the result. Same bounds, same rounding of
// rows and same errors as the shared-memory link, without a second process: for `--link=inprocess`,
// tests, and as the yardstick of what the hand-over costs.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "gpu_worker/expert_link.h"

namespace tandem::gpu {

struct InProcessLinkOptions {
  shm::BatchLimits limits;
  int threads = 1;
  // How long a thread that waits for the others spins before it sleeps.
  std::chrono::microseconds spin{200};
};

// Calls handler->Configure(limits). The handler must outlive the link and serve nobody else.
absl::StatusOr<std::unique_ptr<ExpertLink>> MakeInProcessExpertLink(
    const InProcessLinkOptions& options, shm::BatchHandler* handler);

}  // namespace tandem::gpu
