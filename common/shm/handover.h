// How a link comes to be: the gpu worker connects to the expert worker's Unix stream socket,
// presents the ticket it got from the Attach RPC, and receives the segment's descriptor.
//
//   gpu worker                                expert worker
//   Hello {ticket, own threads and cpus}  ->  peer uid, magic, version, epoch, nonce checked
//                                         <-  Welcome {limits, placement, its threads and cpus} +
//                                         memfd (SCM_RIGHTS)
//                                         <-  Weights + descriptor of the packed experts; only
//                                         where the hello asked and the welcome says that it comes
//   maps, checks seals and control page,
//   takes its life lock; Confirm          ->  takes the attachment into service
//
// The connection then stays open: its end is one of the signs that the peer is gone. Messages are
// fixed-size POD of one machine. Both sides treat what they receive as hostile: copied once, every
// field bounded.
//
// All functions here block at most until their deadline and report errors as Status; thread-safe
// (no state).
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/expert_batch.h"
#include "common/shm/thread_pairs.h"
#include "common/shm/unique_fd.h"

namespace tandem::shm {

// What the Attach RPC returns to the gpu worker; good for one handover, until the next Attach.
struct LinkTicket {
  std::string socket_path;
  uint64_t epoch = 0;
  std::array<uint8_t, 16> nonce{};
  uint64_t segment_bytes = 0;  // for the memory plan
};

inline constexpr uint64_t kHelloMagic = 0x54444d4c494e4b31;    // "TDMLINK1"
inline constexpr uint64_t kWelcomeMagic = 0x54444d57454c4331;  // "TDMWELC1"
inline constexpr uint64_t kConfirmMagic = 0x54444d434f4e4631;  // "TDMCONF1"
inline constexpr uint64_t kWeightsMagic = 0x54444d5745495431;  // "TDMWEIT1"
inline constexpr uint32_t kLinkVersion = 2;

struct ThreadList {
  uint32_t count;
  int16_t cpus[kMaxThreads];  // -1: not pinned
};

struct Hello {
  uint64_t magic;
  uint32_t version;
  uint32_t placement;  // Placement wished for
  uint64_t epoch;
  uint8_t nonce[16];
  ThreadList threads;
  uint32_t wants_weights;  // 0 or 1
};

struct Welcome {
  uint64_t magic;
  uint32_t version;
  uint32_t refusal;  // HandoverRefusal; a descriptor comes with kAccepted only
  uint64_t epoch;
  uint64_t model_hash;
  uint64_t segment_bytes;
  BatchLimits limits;
  uint32_t slots;
  uint32_t placement;  // kApart or kColocated
  ThreadList threads;
  uint32_t has_weights;  // 1: Weights follows
};

// Comes with a descriptor that reads the worker's weight store and cannot write it.
struct Weights {
  uint64_t magic;
  uint64_t epoch;
};

struct Confirm {
  uint64_t magic;
  uint64_t epoch;
};

enum class HandoverRefusal : uint32_t {
  kAccepted = 0,
  kBadMessage = 1,  // magic or a field out of range
  kBadVersion = 2,  // the two programs are of different releases
  kBadTicket = 3,   // epoch or nonce is not that of the last Attach, or it was used already
  kNotReady = 4,    // the worker is draining or could not make the segment
};

using Deadline = std::chrono::steady_clock::time_point;

// Binds and listens; the socket is readable and writable by the owner only, a stale socket file is
// replaced.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path);
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, Deadline deadline);
absl::StatusOr<UniqueFd> AcceptUnix(int listen_fd);

// The other end's process. PERMISSION_DENIED unless it runs as our user or as root.
absl::StatusOr<pid_t> CheckPeer(int socket_fd);

// Whole messages: a peer that closes early or stalls is an error. A descriptor is taken only by
// ReceiveWithFd.
absl::Status SendAll(int socket_fd, const void* data, size_t bytes, Deadline deadline);
absl::Status ReceiveAll(int socket_fd, void* data, size_t bytes, Deadline deadline);
absl::Status SendWithFd(int socket_fd, const void* data, size_t bytes, int fd, Deadline deadline);
// The descriptor is invalid when none came; more than one is an error (all are closed).
absl::StatusOr<UniqueFd> ReceiveWithFd(int socket_fd, void* data, size_t bytes, Deadline deadline);

// True when the peer has closed its end (unread data counts as closed too: the protocol has none).
bool PeerHungUp(int socket_fd);

// A descriptor that becomes readable when `pid` ends; invalid where the kernel refuses (other pid
// namespace).
UniqueFd OpenPidfd(pid_t pid);
// False for an invalid descriptor.
bool ProcessEnded(int pidfd);

ThreadList MakeThreadList(const std::vector<int>& cpus);
HandoverRefusal CheckHello(const Hello& hello, uint64_t epoch,
                           const std::array<uint8_t, 16>& nonce);
// `expected` are the limits that were asked for in the Attach RPC.
absl::Status CheckWelcome(const Welcome& welcome, const LinkTicket& ticket, uint64_t model_hash,
                          const BatchLimits& expected);
absl::Status CheckWeights(const Weights& weights, const LinkTicket& ticket);
// The same file by a descriptor that only reads; invalid where the system refuses.
UniqueFd ReadOnly(int fd);
// REQUIRES: the list passed CheckHello or CheckWelcome.
std::vector<int> CpusOf(const ThreadList& list);

}  // namespace tandem::shm
