#include "tests/gpu_worker/links/raw_peer.h"

#include <cstring>

#include "common/base/status.h"
#include "common/shm/waiting.h"

namespace tandem::testing {

shm::Hello HelloFor(const shm::LinkTicket& ticket, int threads) {
  shm::Hello hello{};
  hello.magic = shm::kHelloMagic;
  hello.version = shm::kLinkVersion;
  hello.epoch = ticket.epoch;
  std::memcpy(hello.nonce, ticket.nonce.data(), ticket.nonce.size());
  hello.threads = shm::MakeThreadList(std::vector<int>(static_cast<size_t>(threads), -1));
  return hello;
}

absl::StatusOr<std::unique_ptr<RawGpuPeer>> RawGpuPeer::Attach(const shm::LinkTicket& ticket,
                                                               const shm::BatchLimits& limits) {
  ASSIGN_OR_RETURN(shm::UniqueFd socket, shm::ConnectUnix(ticket.socket_path, In(5000)));
  const shm::Hello hello = HelloFor(ticket, 1);
  RETURN_IF_ERROR(shm::SendAll(socket.get(), &hello, sizeof(hello), In(5000)));
  shm::Welcome welcome;
  ASSIGN_OR_RETURN(const shm::UniqueFd fd,
                   shm::ReceiveWithFd(socket.get(), &welcome, sizeof(welcome), In(5000)));
  RETURN_IF_ERROR(shm::CheckWelcome(welcome, ticket, welcome.model_hash, limits));
  ASSIGN_OR_RETURN(const shm::SegmentLayout layout,
                   shm::ComputeLayout(welcome.limits, welcome.slots));
  ASSIGN_OR_RETURN(shm::Segment segment, shm::Segment::Map(fd, layout, welcome.segment_bytes,
                                                           welcome.model_hash, welcome.epoch));
  const auto pairs = shm::MakePairs(static_cast<shm::Placement>(welcome.placement), {-1},
                                    shm::CpusOf(welcome.threads));
  std::unique_ptr<RawGpuPeer> peer(new RawGpuPeer(
      std::move(segment), std::move(socket), ticket.epoch, static_cast<uint32_t>(pairs.size())));
  shm::ControlPage* control = peer->view().control();
  shm::LifeLock::Options life;
  life.own = &control->gpu_life;
  life.peer = &control->expert_life;
  life.on_peer_gone = [] {};
  peer->life_ = std::make_unique<shm::LifeLock>(std::move(life));
  const shm::Confirm confirm{.magic = shm::kConfirmMagic, .epoch = ticket.epoch};
  RETURN_IF_ERROR(shm::SendAll(peer->socket_.get(), &confirm, sizeof(confirm), In(5000)));
  return peer;
}

std::optional<uint32_t> RawGpuPeer::Submit(uint64_t sequence, int ms) {
  for (uint32_t i = 0; i < pairs_; ++i) shm::SubmitBell(view().pair(i)).Ring(sequence);
  const shm::Doorbell done = shm::DoneBell(view().pair(0));
  const int64_t end_ns = shm::NowNs() + int64_t{ms} * 1'000'000;
  while (done.Read() < sequence) {
    if (shm::NowNs() > end_ns || aborted()) return std::nullopt;
    done.Sleep(done.Read(), 1'000'000);
  }
  const uint16_t reply = shm::LoadReply(view().pair(0)->done_seq, view().slot_index(sequence));
  if (reply != shm::MakeReply(sequence, reply & 0xFF)) return std::nullopt;
  return reply & 0xFF;
}

}  // namespace tandem::testing
