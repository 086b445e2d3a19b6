#include "gpu_worker/links/shm_expert_link.h"

#include <atomic>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/status.h"
#include "common/shm/life_lock.h"
#include "common/shm/segment.h"
#include "common/shm/slot_check.h"
#include "common/shm/waiting.h"
#include "gpu_worker/links/link_errors.h"
#include "gpu_worker/links/row_copy.h"

namespace tandem::gpu {
namespace {

constexpr int64_t kNsPerUs = 1000;
// A sleeping Wait looks at the peer's progress that often; also bounds a wake-up lost to a dying
// peer.
constexpr int64_t kSliceNs = 20'000'000;
// Between looks at the error state while spinning.
constexpr int64_t kSpinChunkNs = 50'000;
// Thread 0 alone copies that many picks (6 KB): less than sharing them out costs.
constexpr uint64_t kPicksOfOneThread = 1024;

class ShmExpertLink final : public ExpertLink {
 public:
  ShmExpertLink(const ShmLinkOptions& options, shm::Segment segment, shm::UniqueFd socket,
                shm::Placement placement, const std::vector<shm::ThreadPair>& pairs);
  ~ShmExpertLink() override;

  // Takes the life lock and starts watching the worker. To be called once.
  absl::Status Arm(pid_t worker);
  int socket() const { return socket_.get(); }

  const shm::BatchLimits& limits() const override { return view_.layout().limits; }
  bool overlaps() const override { return !colocated_; }
  int threads() const override { return threads_; }
  void BeginStep(uint64_t step) override;
  void Submit(const Submission& submission, int thread, int threads) override;
  void Release(int thread) override;
  void Wait(const Collection& collection, int thread, int threads) override;
  absl::Status EndStep() override;
  LinkError error() const override { return errors_.error(); }
  bool broken() const override { return errors_.broken(); }
  LayerTimes layer_times(uint32_t lane, uint32_t layer) const override;
  uint64_t ticks() const override { return shm::LoadAcquire(view_.control()->expert_ticks.value); }

 private:
  // What one pool thread keeps for itself; all threads count the same sequences.
  struct alignas(shm::kLineBytes) PerThread {
    uint64_t next_sequence = 1;
    uint64_t rung = 0;  // co-located: the last sequence that was let go
    uint64_t lane_sequence[shm::kMaxLanes] = {};
    std::vector<uint32_t> pairs;
  };
  struct alignas(shm::kLineBytes) Arrivals {
    std::atomic<int> count{0};
  };

  void CopyShare(const Submission& submission, uint64_t sequence, uint32_t rows, int thread);
  void Ring(uint64_t sequence, const PerThread& self);
  bool AwaitDone(uint64_t sequence, const PerThread& self);
  bool CheckReply(uint64_t sequence, const PerThread& self);
  void Break(LinkError error);
  void WakeAll() const;

  shm::Segment segment_;
  const shm::SegmentView view_;
  const uint64_t epoch_;
  const int threads_;
  const bool colocated_;
  const int64_t spin_ns_;
  const int64_t deadline_ns_;
  const uint32_t pair_count_;
  std::vector<PerThread> per_thread_;
  Arrivals arrivals_[shm::kMaxSlots];  // apart: the last thread to have copied rings
  std::atomic<uint64_t> step_{0};
  LinkErrors errors_;
  shm::UniqueFd socket_;
  shm::UniqueFd pidfd_;
  std::unique_ptr<shm::LifeLock> life_;
};

ShmExpertLink::ShmExpertLink(const ShmLinkOptions& options, shm::Segment segment,
                             shm::UniqueFd socket, shm::Placement placement,
                             const std::vector<shm::ThreadPair>& pairs)
    : segment_(std::move(segment)),
      view_(segment_.view()),
      epoch_(options.ticket.epoch),
      threads_(static_cast<int>(options.thread_cpus.size())),
      colocated_(placement == shm::Placement::kColocated),
      spin_ns_(colocated_ ? 0 : options.spin.count() * kNsPerUs),
      deadline_ns_(options.deadline.count() * 1000 * kNsPerUs),
      pair_count_(static_cast<uint32_t>(pairs.size())),
      per_thread_(options.thread_cpus.size()),
      socket_(std::move(socket)) {
  for (int thread = 0; thread < threads_; ++thread) {
    auto& own = per_thread_[static_cast<size_t>(thread)].pairs;
    // Apart, the only pair is thread 0's, and all threads look at its done word.
    own = shm::PairsOfGpu(pairs, colocated_ ? thread : 0);
  }
}

ShmExpertLink::~ShmExpertLink() {
  shm::StoreRelease(view_.control()->abort.value, 1);
  WakeAll();
}

absl::Status ShmExpertLink::Arm(pid_t worker) {
  pidfd_ = shm::OpenPidfd(worker);
  shm::LifeLock::Options life;
  life.own = &view_.control()->gpu_life;
  life.peer = &view_.control()->expert_life;
  life.peer_gone = [this] {
    return shm::PeerHungUp(socket_.get()) || shm::ProcessEnded(pidfd_.get());
  };
  life.on_peer_gone = [this] { Break(LinkError::kPeerDied); };
  life_ = std::make_unique<shm::LifeLock>(std::move(life));
  if (!life_->held()) return absl::DataLossError("link: the segment belongs to another process");
  life_->Watch();
  return absl::OkStatus();
}

void ShmExpertLink::WakeAll() const {
  for (uint32_t i = 0; i < pair_count_; ++i) {
    shm::SubmitBell(view_.pair(i)).WakeSleepers();
    shm::DoneBell(view_.pair(i)).WakeSleepers();
  }
}

void ShmExpertLink::Break(LinkError error) {
  errors_.Set(error);
  shm::StoreRelease(view_.control()->abort.value, 1);
  WakeAll();
}

void ShmExpertLink::BeginStep(uint64_t step) {
  errors_.ClearStep();
  step_.store(step, std::memory_order_release);
  shm::ControlPage* control = view_.control();
  shm::AddRelaxed(control->gpu_ticks.value, 1);
  shm::StoreRelease(control->step_active.value, 1);
  // Ahead of the first layer, so that no layer pays the wake-up. Co-located, the core is ours until
  // we sleep.
  if (!colocated_) shm::SubmitBell(view_.pair(0)).WakeSleepers();
}

absl::Status ShmExpertLink::EndStep() {
  shm::StoreRelease(view_.control()->step_active.value, 0);
  return errors_.ToStatus();
}

void ShmExpertLink::Submit(const Submission& submission, int thread, int threads) {
  TANDEM_DCHECK(threads == threads_ && thread >= 0 && thread < threads_);
  TANDEM_DCHECK(submission.lane < limits().lanes &&
                submission.max_rows <= static_cast<int32_t>(limits().max_rows));
  PerThread& self = per_thread_[static_cast<size_t>(thread)];
  const uint64_t sequence = self.next_sequence++;
  self.lane_sequence[submission.lane] = sequence;
  if (broken()) return;
  const uint32_t rows = BoundRows(submission.rows, submission.max_rows, &errors_);
  CopyShare(submission, sequence, rows, thread);
  // Co-located, a ring gives this core away. With ops of ours still to come before Wait (the join
  // of this very one, shared experts) that would cost a switch back and forth: Wait rings.
  if (!colocated_) Ring(sequence, self);
}

void ShmExpertLink::Release(int thread) {
  PerThread& self = per_thread_[static_cast<size_t>(thread)];
  const uint64_t last = self.next_sequence - 1;
  if (!colocated_ || self.rung == last || broken()) return;
  self.rung = last;
  Ring(last, self);
}

void ShmExpertLink::CopyShare(const Submission& submission, uint64_t sequence, uint32_t rows,
                              int thread) {
  const shm::BatchLimits& bounds = limits();
  const uint64_t elements = uint64_t{rows} * bounds.hidden;
  PutRows(bounds.row_type, submission.x, ShareOf(elements, thread, threads_, kElementQuantum),
          view_.x(sequence));
  const uint64_t count = uint64_t{rows} * bounds.top_k;
  Span picks = ShareOf(count, thread, threads_, kElementQuantum);
  if (count <= kPicksOfOneThread) picks = thread == 0 ? Span{0, count} : Span{};
  if (picks.end > picks.begin) {
    const uint64_t n = picks.end - picks.begin;
    std::memcpy(view_.ids(sequence) + picks.begin, submission.ids + picks.begin,
                n * sizeof(uint16_t));
    std::memcpy(view_.weights(sequence) + picks.begin, submission.weights + picks.begin,
                n * sizeof(float));
    if (submission.deferred != nullptr) {
      std::memcpy(view_.deferred(sequence) + picks.begin, submission.deferred + picks.begin, n);
    }
  }
  if (thread == 0) {
    shm::StoreWords(view_.header(sequence),
                    shm::MakeHeader(bounds, sequence, epoch_, step_.load(std::memory_order_relaxed),
                                    submission.lane, submission.layer, rows, submission.flags,
                                    submission.deferred != nullptr));
  }
}

void ShmExpertLink::Ring(uint64_t sequence, const PerThread& self) {
  if (colocated_) {
    for (const uint32_t pair : self.pairs) shm::SubmitBell(view_.pair(pair)).Ring(sequence);
    return;
  }
  if (threads_ > 1) {
    std::atomic<int>& count = arrivals_[sequence % view_.layout().slots].count;
    if (count.fetch_add(1, std::memory_order_acq_rel) != threads_ - 1) return;
    count.store(0, std::memory_order_relaxed);
  }
  shm::SubmitBell(view_.pair(0)).Ring(sequence);
}

void ShmExpertLink::Wait(const Collection& collection, int thread, int threads) {
  TANDEM_DCHECK(threads == threads_ && collection.lane < limits().lanes);
  static_cast<void>(threads);
  const PerThread& self = per_thread_[static_cast<size_t>(thread)];
  const uint64_t sequence = self.lane_sequence[collection.lane];
  TANDEM_DCHECK(sequence > 0);  // Submit comes first
  Release(thread);
  const uint32_t rows = BoundRows(collection.rows, collection.max_rows, &errors_);
  const Span share = ShareOf(uint64_t{rows} * limits().hidden, thread, threads_, kElementQuantum);
  if (AwaitDone(sequence, self) && CheckReply(sequence, self)) {
    const float* results = view_.results(sequence);
    collection.gather == Gather::kStore ? StoreRows(results, share, collection.out)
                                        : AddRows(results, share, collection.out);
  } else if (collection.gather == Gather::kStore) {
    ZeroRows(share, collection.out);
  }
  if (thread == 0) shm::AddRelaxed(view_.control()->gpu_ticks.value, 1);
}

bool ShmExpertLink::AwaitDone(uint64_t sequence, const PerThread& self) {
  const shm::Doorbell bell = shm::DoneBell(view_.pair(self.pairs[0]));
  if (!broken() && bell.Read() >= sequence) return true;
  const shm::ControlPage* control = view_.control();
  const int64_t start_ns = shm::NowNs();
  int64_t progress_ns = start_ns;
  uint64_t ticks = 0;
  for (int64_t now_ns = start_ns;; now_ns = shm::NowNs()) {
    if (broken()) return false;
    const uint64_t done = bell.Read();
    if (done >= sequence) return true;
    if (shm::LoadAcquire(control->abort.value) != 0) {
      Break(LinkError::kAborted);
      return false;
    }
    // The worker's ticks are looked at only after a first spin in vain: the line is busy on its
    // side.
    if (now_ns != start_ns) {
      const uint64_t now_ticks = shm::LoadAcquire(control->expert_ticks.value);
      if (now_ticks != ticks) {
        ticks = now_ticks;
        progress_ns = now_ns;
      } else if (now_ns - progress_ns > deadline_ns_) {
        Break(LinkError::kTimeout);
        return false;
      }
    }
    if (now_ns - start_ns < spin_ns_) {
      shm::SpinUntil({.spin_ns = kSpinChunkNs, .yield = false},
                     [&] { return bell.Read() >= sequence; });
      if (bell.Read() < sequence) shm::YieldCpu();  // costs nothing where the core is ours
    } else {
      bell.Sleep(done, kSliceNs);
    }
  }
}

// Untrusted numbers, for statistics only; an entry of another step says nothing.
LayerTimes ShmExpertLink::layer_times(uint32_t lane, uint32_t layer) const {
  const shm::TimesEntry entry = shm::CopyOnce(*view_.times(lane, layer));
  if (entry.step != step_.load(std::memory_order_relaxed)) return {};
  return {static_cast<int64_t>(entry.begin_ns), static_cast<int64_t>(entry.reply_ns),
          static_cast<int64_t>(entry.end_ns)};
}

bool ShmExpertLink::CheckReply(uint64_t sequence, const PerThread& self) {
  const uint16_t reply =
      shm::LoadReply(view_.pair(self.pairs[0])->done_seq, view_.slot_index(sequence));
  if (reply == shm::MakeReply(sequence, 0)) return true;
  const uint32_t code = reply & 0xFF;
  if (reply != shm::MakeReply(sequence, code)) {
    Break(LinkError::kBadReply);
    return false;
  }
  const bool known = code < static_cast<uint32_t>(shm::RefuseCode::kUnknown);
  errors_.SetRefused(known ? static_cast<shm::RefuseCode>(code) : shm::RefuseCode::kUnknown);
  return false;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertLink>> AttachShmExpertLink(const ShmLinkOptions& options) {
  if (options.thread_cpus.empty() || options.thread_cpus.size() > shm::kMaxThreads) {
    return absl::InvalidArgumentError("link: 1 to 512 threads are possible");
  }
  const shm::LinkTicket& ticket = options.ticket;
  const shm::Deadline deadline = std::chrono::steady_clock::now() + options.attach_timeout;
  ASSIGN_OR_RETURN(shm::UniqueFd socket, shm::ConnectUnix(ticket.socket_path, deadline));
  ASSIGN_OR_RETURN(const pid_t worker, shm::CheckPeer(socket.get()));
  shm::Hello hello{};
  hello.magic = shm::kHelloMagic;
  hello.version = shm::kLinkVersion;
  hello.placement = static_cast<uint32_t>(options.placement);
  hello.epoch = ticket.epoch;
  std::memcpy(hello.nonce, ticket.nonce.data(), ticket.nonce.size());
  hello.threads = shm::MakeThreadList(options.thread_cpus);
  hello.wants_weights = options.weights != nullptr ? 1 : 0;
  RETURN_IF_ERROR(shm::SendAll(socket.get(), &hello, sizeof(hello), deadline));

  shm::Welcome welcome;
  ASSIGN_OR_RETURN(const shm::UniqueFd fd,
                   shm::ReceiveWithFd(socket.get(), &welcome, sizeof(welcome), deadline));
  RETURN_IF_ERROR(shm::CheckWelcome(welcome, ticket, options.model_hash, options.limits));
  if (!fd.valid()) return absl::DataLossError("link: no segment came with the answer");
  if (welcome.has_weights == 1) {
    if (options.weights == nullptr) return absl::DataLossError("link: weights came uninvited");
    shm::Weights weights;
    ASSIGN_OR_RETURN(*options.weights,
                     shm::ReceiveWithFd(socket.get(), &weights, sizeof(weights), deadline));
    RETURN_IF_ERROR(shm::CheckWeights(weights, ticket));
  }
  ASSIGN_OR_RETURN(const shm::SegmentLayout layout,
                   shm::ComputeLayout(welcome.limits, welcome.slots));
  ASSIGN_OR_RETURN(shm::Segment segment, shm::Segment::Map(fd, layout, welcome.segment_bytes,
                                                           welcome.model_hash, welcome.epoch));
  const auto placement = static_cast<shm::Placement>(welcome.placement);
  auto link = std::make_unique<ShmExpertLink>(
      options, std::move(segment), std::move(socket), placement,
      shm::MakePairs(placement, options.thread_cpus, shm::CpusOf(welcome.threads)));
  RETURN_IF_ERROR(link->Arm(worker));
  const shm::Confirm confirm{.magic = shm::kConfirmMagic, .epoch = ticket.epoch};
  RETURN_IF_ERROR(shm::SendAll(link->socket(), &confirm, sizeof(confirm), deadline));
  return link;
}

}  // namespace tandem::gpu
