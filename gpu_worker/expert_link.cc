#include "gpu_worker/expert_link.h"

#include "absl/strings/str_cat.h"

namespace tandem::gpu {

absl::Status LinkStatus(LinkError error) {
  switch (error) {
    case LinkError::kNone:
      return absl::OkStatus();
    case LinkError::kBadSubmission:
      return absl::InternalError("expert link: row count of a submission is out of bounds");
    case LinkError::kRefused:
      return absl::InternalError("expert link: the expert worker refused a submission");
    case LinkError::kBadReply:
      return absl::InternalError("expert link: an answer does not match its submission");
    case LinkError::kPeerDied:
      return absl::UnavailableError("expert link: the expert worker died");
    case LinkError::kTimeout:
      return absl::UnavailableError("expert link: the expert worker makes no progress");
    case LinkError::kAborted:
      return absl::UnavailableError("expert link: the expert worker ended the link");
  }
  return absl::InternalError(
      absl::StrCat("expert link: unknown error ", static_cast<uint32_t>(error)));
}

}  // namespace tandem::gpu
