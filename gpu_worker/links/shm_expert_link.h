// The gpu worker's end of the shared-memory link to one expert worker (the other end:
// expert_worker/link_loop.h; design: common/shm/README.md). See gpu_worker/expert_link.h for the
// contract.
//
// Attach blocks (socket, mmap) and starts one life thread; the data plane (Submit, Wait) makes no
// system call while the worker answers within the spin time, and no allocation, lock or Status
// ever.
//
// Detection of a lost worker, whichever is first: its robust futex (0.1 ms after SIGKILL), the
// socket or pidfd (polled every 200 ms), the abort word, no progress for `deadline` while Wait is
// blocked (SIGSTOP, a hung pool).
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/handover.h"
#include "gpu_worker/expert_link.h"

namespace tandem::gpu {

struct ShmLinkOptions {
  shm::LinkTicket ticket;        // from the Attach RPC
  uint64_t model_hash = 0;       // that both sides must agree on
  shm::BatchLimits limits;       // that Attach asked for
  std::vector<int> thread_cpus;  // CPU of each pool thread, -1 = not pinned; one entry a thread
  shm::Placement placement = shm::Placement::kAuto;
  std::chrono::milliseconds deadline{1500};  // without progress, while a wait is blocked
  std::chrono::milliseconds attach_timeout{5000};
  // Where the descriptor of the worker's weight store goes, invalid if it gives none; null: it is
  // not asked for.
  shm::UniqueFd* weights = nullptr;
  // Apart only: how long Wait spins before it sleeps on a futex.
  std::chrono::microseconds spin{20000};
};

// Errors: UNAVAILABLE (nobody listens, timeout), PERMISSION_DENIED (ticket refused, foreign user),
// FAILED_PRECONDITION (version, model hash or limits differ), DATA_LOSS (segment is not what was
// announced).
absl::StatusOr<std::unique_ptr<ExpertLink>> AttachShmExpertLink(const ShmLinkOptions& options);

}  // namespace tandem::gpu
