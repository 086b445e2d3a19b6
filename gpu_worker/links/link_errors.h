// The error state of one link, without Status on the data plane: the first error of a step sticks,
// some errors break the link for good. All methods may be called from any thread.
#pragma once

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "common/shm/slot_check.h"
#include "gpu_worker/expert_link.h"

namespace tandem::gpu {

class LinkErrors {
 public:
  // Keeps the first error. All but kBadSubmission and kRefused break the link.
  void Set(LinkError error);
  void SetRefused(shm::RefuseCode code);
  // Forgets an error that did not break the link.
  void ClearStep();

  LinkError error() const { return error_.load(std::memory_order_acquire); }
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  absl::Status ToStatus() const;

 private:
  std::atomic<LinkError> error_{LinkError::kNone};
  std::atomic<bool> broken_{false};
  std::atomic<shm::RefuseCode> refused_{shm::RefuseCode::kAccepted};
};

// *rows if it is within 0..max_rows; else 0 and kBadSubmission.
uint32_t BoundRows(const int32_t* rows, int32_t max_rows, LinkErrors* errors);

}  // namespace tandem::gpu
