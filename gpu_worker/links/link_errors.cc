#include "gpu_worker/links/link_errors.h"

#include "absl/strings/str_cat.h"

namespace tandem::gpu {

void LinkErrors::Set(LinkError error) {
  LinkError none = LinkError::kNone;
  error_.compare_exchange_strong(none, error, std::memory_order_acq_rel);
  if (error == LinkError::kBadSubmission || error == LinkError::kRefused) return;
  // A breaking error is what the owner must see, even after a milder one.
  if (!broken_.exchange(true, std::memory_order_acq_rel)) {
    error_.store(error, std::memory_order_release);
  }
}

void LinkErrors::SetRefused(shm::RefuseCode code) {
  refused_.store(code, std::memory_order_relaxed);
  Set(LinkError::kRefused);
}

void LinkErrors::ClearStep() {
  LinkError bad = LinkError::kBadSubmission;
  error_.compare_exchange_strong(bad, LinkError::kNone, std::memory_order_acq_rel);
  LinkError refused = LinkError::kRefused;
  error_.compare_exchange_strong(refused, LinkError::kNone, std::memory_order_acq_rel);
}

absl::Status LinkErrors::ToStatus() const {
  const LinkError error = this->error();
  const absl::Status status = LinkStatus(error);
  if (error != LinkError::kRefused) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), ": ",
                                   shm::RefuseText(refused_.load(std::memory_order_relaxed))));
}

uint32_t BoundRows(const int32_t* rows, int32_t max_rows, LinkErrors* errors) {
  const int32_t value = *rows;
  if (value >= 0 && value <= max_rows) return static_cast<uint32_t>(value);
  errors->Set(LinkError::kBadSubmission);
  return 0;
}

}  // namespace tandem::gpu
