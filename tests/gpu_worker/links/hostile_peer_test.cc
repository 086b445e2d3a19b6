// A peer that breaks the rules: random bytes in every header field, doorbells that jump, handovers
// cut short, tickets that are stale. The worker refuses the slot or the peer, and serves the next
// one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "common/shm/slot_check.h"
#include "common/shm/waiting.h"
#include "tests/gpu_worker/links/link_harness.h"
#include "tests/gpu_worker/links/raw_peer.h"

namespace tandem::testing {
namespace {

using absl::StatusCode;

constexpr uint64_t kSeed = 7041;

class HostilePeer : public ::testing::TestWithParam<shm::Placement> {
 protected:
  HostilePeer() : worker_(dir_.Socket("expert0.link"), 2, GetParam()) {}

  std::unique_ptr<RawGpuPeer> Attach() {
    const auto ticket = worker_.Offer(TestLimits());
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    auto peer = RawGpuPeer::Attach(*ticket, TestLimits());
    EXPECT_TRUE(peer.ok()) << peer.status();
    return std::move(peer).value();
  }

  // A proper gpu worker gets a right answer.
  void ExpectServes() {
    const auto ticket = worker_.Offer(TestLimits());
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    auto link = gpu::AttachShmExpertLink(LinkOptions(*ticket, TestLimits(), 2));
    ASSERT_TRUE(link.ok()) << link.status();
    int mismatches = 0;
    EXPECT_TRUE(
        RunStep(link->get(), {.step = 1, .layers = 3, .rows_of_lane = {2, 2}}, 1, &mismatches)
            .ok());
    EXPECT_EQ(mismatches, 0);
  }

  shm::SlotHeader GoodHeader(const RawGpuPeer& peer, uint64_t sequence) {
    return shm::MakeHeader(TestLimits(), sequence, peer.epoch(), 1, 0, 0, 3, 0, true);
  }

  TempSocketDir dir_;
  ExpertWorkerThreads worker_;
};

TEST_P(HostilePeer, RandomBytesInEveryHeaderFieldAreRefusedOrHarmless) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  std::mt19937_64 random(kSeed);
  const auto peer = Attach();
  ASSERT_NE(peer, nullptr);
  uint64_t refused = 0;
  uint64_t sequence = 0;
  for (size_t word = 0; word < sizeof(shm::SlotHeader) / sizeof(uint32_t); ++word) {
    for (int round = 0; round < 12; ++round) {
      ++sequence;
      shm::SlotHeader header = GoodHeader(*peer, sequence);
      uint32_t value = static_cast<uint32_t>(random());
      // Near misses as well as noise.
      if (round % 3 == 1) value = static_cast<uint32_t>(random() % 130);
      if (round % 3 == 2) value = ~0u - static_cast<uint32_t>(random() % 3);
      std::memcpy(reinterpret_cast<char*>(&header) + word * sizeof(value), &value, sizeof(value));
      const auto expected = shm::CheckHeader(header, TestLimits(), sequence, peer->epoch());
      shm::StoreWords(peer->view().header(sequence), header);
      const auto reply = peer->Submit(sequence, 5000);
      ASSERT_TRUE(reply.has_value()) << "word " << word;
      EXPECT_EQ(*reply, static_cast<uint32_t>(expected)) << "word " << word;
      if (expected != shm::RefuseCode::kAccepted) ++refused;
    }
  }
  EXPECT_GT(refused, 150u);
  EXPECT_EQ(worker_.loop().state().refused_slots, refused);
  EXPECT_FALSE(peer->aborted());
  ExpectServes();
}

TEST_P(HostilePeer, ExpertIdsOutOfRangeAreRefused) {
  const auto peer = Attach();
  ASSERT_NE(peer, nullptr);
  uint64_t sequence = 0;
  for (const uint16_t id : {uint16_t{16}, uint16_t{17}, uint16_t{255}, uint16_t{0xFFFE}}) {
    ++sequence;
    shm::StoreWords(peer->view().header(sequence), GoodHeader(*peer, sequence));
    peer->view().ids(sequence)[11] = id;
    const auto reply = peer->Submit(sequence, 5000);
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(*reply, static_cast<uint32_t>(shm::RefuseCode::kExpert)) << id;
    peer->view().ids(sequence)[11] = 0;
  }
  EXPECT_EQ(worker_.experts().runs(), 0u);
  ExpectServes();
}

TEST_P(HostilePeer, ASlotLeftFromAnOlderSequenceOrEpochIsStale) {
  const auto peer = Attach();
  ASSERT_NE(peer, nullptr);
  // The slot's last user, one turn ago.
  const uint64_t slots = peer->view().layout().slots;
  for (uint64_t sequence = 1; sequence <= slots; ++sequence) {
    shm::StoreWords(peer->view().header(sequence), GoodHeader(*peer, sequence));
    ASSERT_EQ(peer->Submit(sequence, 5000), 0u);
  }
  EXPECT_EQ(peer->Submit(slots + 1, 5000), static_cast<uint32_t>(shm::RefuseCode::kStale));
  // Half-written: the tail is still the old one.
  shm::SlotHeader header = GoodHeader(*peer, slots + 2);
  header.sequence_again = 2;
  shm::StoreWords(peer->view().header(slots + 2), header);
  EXPECT_EQ(peer->Submit(slots + 2, 5000), static_cast<uint32_t>(shm::RefuseCode::kStale));
  header = GoodHeader(*peer, slots + 3);
  header.epoch -= 1;
  shm::StoreWords(peer->view().header(slots + 3), header);
  EXPECT_EQ(peer->Submit(slots + 3, 5000), static_cast<uint32_t>(shm::RefuseCode::kStale));
  ExpectServes();
}

TEST_P(HostilePeer, ADoorbellThatJumpsEndsTheAttachment) {
  for (const uint64_t jump : {uint64_t{5}, uint64_t{1} << 40, ~uint64_t{0}}) {
    const auto peer = Attach();
    ASSERT_NE(peer, nullptr);
    EXPECT_FALSE(peer->Submit(jump, 5000).has_value());
    EXPECT_TRUE(peer->aborted());
    EXPECT_TRUE(Eventually([&] { return !worker_.loop().state().attached; }));
  }
  ExpectServes();
}

TEST_P(HostilePeer, NoiseOverTheWholeSegmentHurtsNobodyElse) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 6; ++round) {
    const auto peer = Attach();
    ASSERT_NE(peer, nullptr);
    auto* words = reinterpret_cast<uint64_t*>(peer->view().control());
    const size_t control_words = sizeof(shm::ControlPage) / sizeof(uint64_t);
    // Not the life words: their noise is a death, which has its own test.
    for (size_t i = 0; i < 5 * shm::kLineBytes / sizeof(uint64_t); ++i) {
      if (i != offsetof(shm::ControlPage, abort) / sizeof(uint64_t)) {
        shm::StoreRelease(words[i], random());
      }
    }
    auto* slots = reinterpret_cast<uint64_t*>(peer->view().slot(0));
    ASSERT_LT(control_words, peer->view().layout().slot_bytes);
    for (size_t i = 0; i < peer->view().layout().slot_bytes / sizeof(uint64_t); ++i) {
      shm::StoreRelease(slots[i], random());
    }
    for (uint64_t sequence = 1; sequence <= 8; ++sequence) {
      const auto reply = peer->Submit(sequence, 5000);
      ASSERT_TRUE(reply.has_value());
      EXPECT_NE(*reply, 0u);
    }
  }
  ExpectServes();
}

TEST_P(HostilePeer, TicketsAreGoodOnceAndOnlyUntilTheNextOffer) {
  const auto first = worker_.Offer(TestLimits());
  const auto second = worker_.Offer(TestLimits());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->epoch, second->epoch);
  auto link = gpu::AttachShmExpertLink(LinkOptions(*first, TestLimits(), 1));
  EXPECT_EQ(link.status().code(), StatusCode::kPermissionDenied) << link.status();
  auto guessed = LinkOptions(*second, TestLimits(), 1);
  guessed.ticket.nonce[3] ^= 1;
  EXPECT_EQ(gpu::AttachShmExpertLink(guessed).status().code(), StatusCode::kPermissionDenied);
  link = gpu::AttachShmExpertLink(LinkOptions(*second, TestLimits(), 1));
  EXPECT_TRUE(link.ok()) << link.status();
  EXPECT_EQ(gpu::AttachShmExpertLink(LinkOptions(*second, TestLimits(), 1)).status().code(),
            StatusCode::kPermissionDenied);
  int mismatches = 0;
  EXPECT_TRUE(
      RunStep(link->get(), {.step = 1, .layers = 2, .rows_of_lane = {1}}, 1, &mismatches).ok());
}

TEST_P(HostilePeer, AnotherModelOrOtherLimitsAreRefused) {
  auto ticket = worker_.Offer(TestLimits());
  ASSERT_TRUE(ticket.ok());
  auto options = LinkOptions(*ticket, TestLimits(), 1);
  options.model_hash ^= 1;
  EXPECT_EQ(gpu::AttachShmExpertLink(options).status().code(), StatusCode::kFailedPrecondition);
  ticket = worker_.Offer(TestLimits());
  options = LinkOptions(*ticket, TestLimits(), 1);
  options.limits.hidden += 1;
  EXPECT_EQ(gpu::AttachShmExpertLink(options).status().code(), StatusCode::kFailedPrecondition);
  shm::BatchLimits senseless = TestLimits();
  senseless.lanes = 0;
  EXPECT_EQ(worker_.Offer(senseless).status().code(), StatusCode::kInvalidArgument);
  ExpectServes();
}

TEST_P(HostilePeer, HandoversCutShortLeaveNothing) {
  const int descriptors = OpenDescriptors();
  for (int stage = 0; stage < 6; ++stage) {
    const auto ticket = worker_.Offer(TestLimits());
    ASSERT_TRUE(ticket.ok());
    auto socket = shm::ConnectUnix(ticket->socket_path, In(1000));
    ASSERT_TRUE(socket.ok());
    shm::Hello hello = HelloFor(*ticket, 1);
    if (stage == 1) {
      ASSERT_TRUE(shm::SendAll(socket->get(), &hello, 40, In(1000)).ok());
    }
    if (stage == 2) hello.magic ^= 1;
    if (stage == 3) hello.threads.count = shm::kMaxThreads + 1;
    if (stage >= 2) {
      ASSERT_TRUE(shm::SendAll(socket->get(), &hello, sizeof(hello), In(1000)).ok());
    }
    if (stage == 4) {
      char half[60];
      ASSERT_TRUE(shm::ReceiveWithFd(socket->get(), half, sizeof(half), In(1000)).ok());
    }
    if (stage == 5) {
      shm::Welcome welcome;
      ASSERT_TRUE(shm::ReceiveWithFd(socket->get(), &welcome, sizeof(welcome), In(1000)).ok());
      const shm::Confirm confirm{.magic = 1, .epoch = 2};
      ASSERT_TRUE(shm::SendAll(socket->get(), &confirm, sizeof(confirm), In(1000)).ok());
    }
    socket->Reset();
    EXPECT_FALSE(worker_.loop().state().attached) << stage;
  }
  ExpectServes();
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors; }))
      << OpenDescriptors() << " open, " << descriptors << " before";
  EXPECT_TRUE(Eventually([] { return MappingsNamed("memfd:tandem-link") == 0; }));
}

TEST_P(HostilePeer, IdleThreadsSleep) {
  const auto ticket = worker_.Offer(TestLimits());
  ASSERT_TRUE(ticket.ok());
  auto link = gpu::AttachShmExpertLink(LinkOptions(*ticket, TestLimits(), 2));
  ASSERT_TRUE(link.ok());
  int mismatches = 0;
  ASSERT_TRUE(
      RunStep(link->get(), {.step = 1, .layers = 2, .rows_of_lane = {1}}, 1, &mismatches).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto cpu_us = [] {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
  };
  const int64_t before = cpu_us();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  // One spinning thread would take 500 ms.
  EXPECT_LT(cpu_us() - before, 10'000);
}

INSTANTIATE_TEST_SUITE_P(Placements, HostilePeer,
                         ::testing::Values(shm::Placement::kApart, shm::Placement::kColocated),
                         [](const auto& info) {
                           return info.param == shm::Placement::kApart ? "apart" : "colocated";
                         });

// The gpu worker's end against an expert worker that lies: `Serve` plays it once.
class LyingWorker : public ::testing::Test {
 protected:
  absl::Status AttachTo(const std::function<void(int socket)>& play) {
    auto listener = shm::ListenUnix(path_);
    EXPECT_TRUE(listener.ok());
    std::thread server([&] {
      auto socket = shm::AcceptUnix(listener->get());
      while (!socket.ok()) socket = shm::AcceptUnix(listener->get());
      shm::Hello hello;
      if (shm::ReceiveAll(socket->get(), &hello, sizeof(hello), In(2000)).ok()) {
        play(socket->get());
      }
    });
    shm::LinkTicket ticket{.socket_path = path_, .epoch = 5, .nonce = {}, .segment_bytes = 0};
    auto options = LinkOptions(ticket, TestLimits(), 1);
    options.attach_timeout = std::chrono::milliseconds(500);
    const absl::Status status = gpu::AttachShmExpertLink(options).status();
    server.join();
    return status;
  }

  shm::Welcome GoodWelcome(const shm::Segment& segment) {
    shm::Welcome welcome{};
    welcome.magic = shm::kWelcomeMagic;
    welcome.version = shm::kLinkVersion;
    welcome.epoch = 5;
    welcome.model_hash = kModelHash;
    welcome.segment_bytes = segment.mapped_bytes();
    welcome.limits = TestLimits();
    welcome.slots = 4;
    welcome.placement = static_cast<uint32_t>(shm::Placement::kApart);
    welcome.threads = shm::MakeThreadList({-1});
    return welcome;
  }

  shm::Segment MakeSegment(uint64_t epoch) {
    return shm::Segment::Create(shm::ComputeLayout(TestLimits(), 4).value(), kModelHash, epoch)
        .value();
  }

  TempSocketDir dir_;
  const std::string path_ = dir_.Socket("liar.link");
};

TEST_F(LyingWorker, SilenceAndHalfAnAnswerEndInTime) {
  EXPECT_EQ(
      AttachTo([](int) { std::this_thread::sleep_for(std::chrono::milliseconds(700)); }).code(),
      StatusCode::kDeadlineExceeded);
  EXPECT_EQ(
      AttachTo([](int socket) { shm::SendAll(socket, "1234", 4, In(100)).IgnoreError(); }).code(),
      StatusCode::kUnavailable);
}

TEST_F(LyingWorker, AnAnswerWithoutOrWithAWrongSegmentIsDataLoss) {
  const shm::Segment segment = MakeSegment(5);
  const shm::Segment other = MakeSegment(6);
  const shm::Welcome welcome = GoodWelcome(segment);
  const auto send = [&](const shm::Welcome& what, int fd) {
    return AttachTo([&](int socket) {
      shm::SendWithFd(socket, &what, sizeof(what), fd, In(500)).IgnoreError();
    });
  };
  EXPECT_EQ(AttachTo([&](int socket) {
              shm::SendAll(socket, &welcome, sizeof(welcome), In(500)).IgnoreError();
            }).code(),
            StatusCode::kDataLoss);
  EXPECT_EQ(send(welcome, other.fd()).code(), StatusCode::kDataLoss);
  const shm::UniqueFd plain(memfd_create("unsealed", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(plain.get(), static_cast<off_t>(segment.mapped_bytes())), 0);
  EXPECT_EQ(send(welcome, plain.get()).code(), StatusCode::kDataLoss);
  shm::Welcome wrong = welcome;
  wrong.segment_bytes += 4096;
  EXPECT_EQ(send(wrong, segment.fd()).code(), StatusCode::kDataLoss);
  wrong = welcome;
  wrong.threads.count = 0;
  EXPECT_EQ(send(wrong, segment.fd()).code(), StatusCode::kDataLoss);
  wrong = welcome;
  wrong.slots = 3;  // fewer than two a lane
  EXPECT_FALSE(send(wrong, segment.fd()).ok());
  wrong = welcome;
  wrong.version += 1;
  EXPECT_EQ(send(wrong, segment.fd()).code(), StatusCode::kFailedPrecondition);
}

TEST_F(LyingWorker, NoiseInTheReplyIsAnErrorOfTheStep) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 24; ++round) {
    const shm::Segment segment = MakeSegment(5);
    const shm::SegmentView view = segment.view();
    auto listener = shm::ListenUnix(path_);
    ASSERT_TRUE(listener.ok());
    std::thread server([&] {
      shm::LifeLock life({.own = &view.control()->expert_life,
                          .peer = &view.control()->gpu_life,
                          .peer_gone = {},
                          .on_peer_gone = [] {}});
      auto socket = shm::AcceptUnix(listener->get());
      while (!socket.ok()) socket = shm::AcceptUnix(listener->get());
      shm::Hello hello;
      shm::Confirm confirm;
      const shm::Welcome welcome = GoodWelcome(segment);
      ASSERT_TRUE(shm::ReceiveAll(socket->get(), &hello, sizeof(hello), In(2000)).ok());
      ASSERT_TRUE(
          shm::SendWithFd(socket->get(), &welcome, sizeof(welcome), segment.fd(), In(2000)).ok());
      ASSERT_TRUE(shm::ReceiveAll(socket->get(), &confirm, sizeof(confirm), In(2000)).ok());
      ASSERT_TRUE(Eventually([&] { return shm::SubmitBell(view.pair(0)).Read() == 1; }));
      shm::StoreReply(view.pair(0)->done_seq, view.slot_index(1),
                      static_cast<uint16_t>(random() | 1));
      const uint64_t noise = random() | 1;
      shm::DoneBell(view.pair(0)).Ring(round % 2 == 0 ? 1 : noise);
      EXPECT_TRUE(Eventually([&] { return shm::PeerHungUp(socket->get()); }));
    });
    shm::LinkTicket ticket{.socket_path = path_, .epoch = 5, .nonce = {}, .segment_bytes = 0};
    auto link = gpu::AttachShmExpertLink(LinkOptions(ticket, TestLimits(), 1));
    ASSERT_TRUE(link.ok()) << link.status();
    int mismatches = 0;
    const absl::Status status =
        RunStep(link->get(), {.step = 1, .layers = 1, .rows_of_lane = {3}}, 1, &mismatches);
    EXPECT_EQ(status.code(), StatusCode::kInternal) << status;
    link->reset();
    server.join();
  }
}

}  // namespace
}  // namespace tandem::testing
