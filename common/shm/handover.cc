#include "common/shm/handover.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/shm/layout.h"

namespace tandem::shm {
namespace {

bool CheckThreads(const ThreadList& list) {
  if (list.count < 1 || list.count > kMaxThreads) return false;
  for (uint32_t i = 0; i < list.count; ++i) {
    if (list.cpus[i] < -1) return false;
  }
  return true;
}

const char* RefusalText(uint32_t refusal) {
  switch (static_cast<HandoverRefusal>(refusal)) {
    case HandoverRefusal::kAccepted:
      return "accepted";
    case HandoverRefusal::kBadMessage:
      return "it could not read our message";
    case HandoverRefusal::kBadVersion:
      return "it is of another release";
    case HandoverRefusal::kBadTicket:
      return "the ticket is not that of its last Attach";
    case HandoverRefusal::kNotReady:
      return "it is draining or short of memory";
  }
  return "unknown reason";
}

}  // namespace

ThreadList MakeThreadList(const std::vector<int>& cpus) {
  ThreadList list{};
  list.count = static_cast<uint32_t>(std::min<size_t>(cpus.size(), kMaxThreads));
  for (uint32_t i = 0; i < list.count; ++i) {
    list.cpus[i] = static_cast<int16_t>(cpus[i] > INT16_MAX ? -1 : cpus[i]);
  }
  return list;
}

std::vector<int> CpusOf(const ThreadList& list) {
  return std::vector<int>(list.cpus, list.cpus + list.count);
}

HandoverRefusal CheckHello(const Hello& hello, uint64_t epoch,
                           const std::array<uint8_t, 16>& nonce) {
  if (hello.magic != kHelloMagic) return HandoverRefusal::kBadMessage;
  if (hello.version != kLinkVersion) return HandoverRefusal::kBadVersion;
  if (hello.placement > static_cast<uint32_t>(Placement::kColocated) || hello.wants_weights > 1 ||
      !CheckThreads(hello.threads)) {
    return HandoverRefusal::kBadMessage;
  }
  // Every byte is looked at, so that the time taken tells nothing.
  uint8_t difference = 0;
  for (size_t i = 0; i < nonce.size(); ++i) difference |= hello.nonce[i] ^ nonce[i];
  if (hello.epoch != epoch || epoch == 0 || difference != 0) return HandoverRefusal::kBadTicket;
  return HandoverRefusal::kAccepted;
}

absl::Status CheckWelcome(const Welcome& welcome, const LinkTicket& ticket, uint64_t model_hash,
                          const BatchLimits& expected) {
  if (welcome.magic != kWelcomeMagic) {
    return absl::DataLossError("link: what listens there is no expert worker");
  }
  if (welcome.version != kLinkVersion) {
    return absl::FailedPreconditionError(absl::StrCat("link: the expert worker speaks version ",
                                                      welcome.version, ", not ", kLinkVersion,
                                                      "; both must be of one release"));
  }
  if (welcome.refusal != static_cast<uint32_t>(HandoverRefusal::kAccepted)) {
    const std::string text =
        absl::StrCat("link: the expert worker refused: ", RefusalText(welcome.refusal));
    if (welcome.refusal == static_cast<uint32_t>(HandoverRefusal::kBadTicket)) {
      return absl::PermissionDeniedError(text);
    }
    return absl::UnavailableError(text);
  }
  if (welcome.epoch != ticket.epoch) return absl::DataLossError("link: answered for another epoch");
  if (welcome.model_hash != model_hash) {
    return absl::FailedPreconditionError("link: the expert worker has another model loaded");
  }
  if (std::memcmp(&welcome.limits, &expected, sizeof(expected)) != 0) {
    return absl::FailedPreconditionError(
        "link: the expert worker's limits are not those asked for");
  }
  if (welcome.slots < 1 || welcome.slots > kMaxSlots || !CheckThreads(welcome.threads) ||
      welcome.has_weights > 1 ||
      (welcome.placement != static_cast<uint32_t>(Placement::kApart) &&
       welcome.placement != static_cast<uint32_t>(Placement::kColocated))) {
    return absl::DataLossError("link: the expert worker's answer is out of range");
  }
  return absl::OkStatus();
}

absl::Status CheckWeights(const Weights& weights, const LinkTicket& ticket) {
  if (weights.magic == kWeightsMagic && weights.epoch == ticket.epoch) return absl::OkStatus();
  return absl::DataLossError("link: what came with the weights is malformed");
}

UniqueFd ReadOnly(int fd) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd);
  return UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

UniqueFd OpenPidfd(pid_t pid) {
  if (pid <= 0) return UniqueFd();
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace tandem::shm
