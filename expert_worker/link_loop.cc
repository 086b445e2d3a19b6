#include "expert_worker/link_loop.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <condition_variable>
#include <ctime>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/shm/life_lock.h"
#include "common/shm/team_barrier.h"
#include "expert_worker/link_attachment.h"

namespace tandem::expert {
namespace {

// A local peer answers in microseconds; one that does not must not keep others waiting.
constexpr std::chrono::seconds kHandoverTimeout{2};
// A submission in progress ends well within that, unless the handler hangs.
constexpr std::chrono::seconds kLeaveTimeout{5};
// How often the control thread asks whether the compute threads have left an ended attachment.
constexpr int kLeavePollMs = 20;

// Unique across restarts of the worker, so that an old segment's epoch never comes back.
uint64_t FirstEpoch() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

int OnlineCpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

class LinkLoop::Impl {
 public:
  Impl(const Options& options, shm::BatchHandler* handler, shm::UniqueFd listener,
       shm::UniqueFd wake)
      : options_(options),
        handler_(handler),
        listener_(std::move(listener)),
        wake_(std::move(wake)),
        barrier_(threads()),
        epoch_(FirstEpoch()) {
    control_thread_ = std::thread([this] { ControlMain(); });
  }

  ~Impl() {
    Stop();
    unlink(options_.socket_path.c_str());
  }

  absl::StatusOr<shm::LinkTicket> Offer(const AttachSpec& spec);
  void RunThread(int thread);
  void Detach();
  void Stop();
  State state() const;

 private:
  // An Offer that nobody has claimed yet.
  struct Pending {
    shm::Segment segment;
    std::array<uint8_t, 16> nonce;
    uint64_t model_hash;
    shm::UniqueFd weights;  // reads only; invalid: none
  };
  // What keeps an attachment: destroyed in reverse order, the life lock first.
  struct Current {
    std::shared_ptr<LinkAttachment> attachment;
    shm::UniqueFd socket;
    shm::UniqueFd pidfd;
    std::unique_ptr<shm::LifeLock> life;
    pid_t pid = 0;
    uint64_t withdrawals = 0;  // at the time of the claim
  };

  int threads() const { return static_cast<int>(options_.thread_cpus.size()); }
  void Wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  }

  void ControlMain();
  absl::Status AcceptPeer();
  absl::Status Claim(const shm::Hello& hello, int socket_fd, Current* current);
  absl::Status Refuse(int socket_fd, shm::HandoverRefusal refusal);
  void Publish(Current current);
  // Both REQUIRE mutex_ and return false when the compute threads did not leave in time.
  bool Withdraw();  // what is offered, claimed or attached
  bool DropCurrent(std::chrono::milliseconds timeout);
  void Pick();
  void PutBack();

  const Options options_;
  shm::BatchHandler* const handler_;
  const shm::UniqueFd listener_;
  const shm::UniqueFd wake_;
  shm::TeamBarrier barrier_;
  LinkCounters counters_;
  std::atomic<uint64_t> attachments_{0};

  mutable std::mutex mutex_;  // of what Offer, Detach and the control thread share
  uint64_t epoch_;
  std::optional<Pending> pending_;
  std::optional<Current> current_;
  uint64_t withdrawals_ = 0;  // an Offer, Detach or Stop outdates a handover in progress
  bool stopping_ = false;

  std::mutex team_mutex_;  // between the owner of attachments and the compute threads
  std::condition_variable team_changed_;
  std::shared_ptr<LinkAttachment> offered_;
  std::shared_ptr<LinkAttachment> serving_;
  bool team_stop_ = false;

  std::thread control_thread_;
};

// ---------------------------------------------------------------- compute threads

void LinkLoop::Impl::RunThread(int thread) {
  TANDEM_CHECK(thread >= 0 && thread < threads());
  const shm::SpinPolicy idle;
  while (true) {
    if (thread == 0) Pick();
    barrier_.Wait(idle);
    LinkAttachment* attachment = serving_.get();  // changed by thread 0 only, between barriers
    if (attachment == nullptr) return;
    attachment->Serve(handler_, &barrier_, &counters_, thread);
    barrier_.Wait(idle);
    if (thread == 0) PutBack();
  }
}

void LinkLoop::Impl::Pick() {
  std::unique_lock<std::mutex> lock(team_mutex_);
  team_changed_.wait(lock, [this] { return team_stop_ || offered_ != nullptr; });
  serving_ = team_stop_ ? nullptr : std::exchange(offered_, nullptr);
}

void LinkLoop::Impl::PutBack() {
  const std::lock_guard<std::mutex> lock(team_mutex_);
  serving_.reset();
  team_changed_.notify_all();
}

// ---------------------------------------------------------------- control

absl::StatusOr<shm::LinkTicket> LinkLoop::Impl::Offer(const AttachSpec& spec) {
  ASSIGN_OR_RETURN(const shm::SegmentLayout layout,
                   shm::ComputeLayout(spec.limits, shm::SlotsFor(spec.limits.lanes)));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return absl::UnavailableError("link: the expert worker is stopping");
  if (!Withdraw()) {
    return absl::UnavailableError("link: the compute threads hang in the previous submission");
  }
  RETURN_IF_ERROR(handler_->Configure(spec.limits));
  ++epoch_;
  ASSIGN_OR_RETURN(shm::Segment segment, shm::Segment::Create(layout, spec.model_hash, epoch_));
  shm::LinkTicket ticket;
  ticket.socket_path = options_.socket_path;
  ticket.epoch = epoch_;
  ticket.segment_bytes = segment.mapped_bytes();
  if (getrandom(ticket.nonce.data(), ticket.nonce.size(), 0) !=
      static_cast<ssize_t>(ticket.nonce.size())) {
    return absl::InternalError("link: no random bytes for a ticket");
  }
  shm::UniqueFd weights;
  if (spec.weights_fd >= 0) weights = shm::ReadOnly(spec.weights_fd);
  pending_.emplace(Pending{std::move(segment), ticket.nonce, spec.model_hash, std::move(weights)});
  return ticket;
}

void LinkLoop::Impl::Detach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Withdraw();
}

void LinkLoop::Impl::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    Withdraw();
  }
  Wake();
  control_thread_.join();
  const std::lock_guard<std::mutex> lock(team_mutex_);
  team_stop_ = true;
  team_changed_.notify_all();
}

LinkLoop::State LinkLoop::Impl::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  State state;
  state.attached = current_.has_value() && !current_->attachment->ended();
  state.epoch = epoch_;
  state.batches = counters_.batches.load(std::memory_order_relaxed);
  state.refused_slots = counters_.refused_slots.load(std::memory_order_relaxed);
  state.attachments = attachments_.load(std::memory_order_relaxed);
  if (current_.has_value()) {
    state.colocated = current_->attachment->colocated();
    state.page_kind = current_->attachment->segment().page_kind();
  }
  return state;
}

bool LinkLoop::Impl::Withdraw() {
  ++withdrawals_;
  pending_.reset();
  return DropCurrent(kLeaveTimeout);
}

// Ends the current attachment and frees it once the compute threads have left it.
bool LinkLoop::Impl::DropCurrent(std::chrono::milliseconds timeout) {
  if (!current_.has_value()) return true;
  const std::shared_ptr<LinkAttachment> attachment = current_->attachment;
  attachment->End();
  {
    std::unique_lock<std::mutex> lock(team_mutex_);
    if (offered_ == attachment) offered_.reset();
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    // Waking is repeated: a thread may look just before End and fall asleep just after it.
    auto pause = std::chrono::milliseconds(1);
    while (serving_ == attachment) {
      attachment->WakeAll();
      team_changed_.wait_for(lock, pause);
      if (serving_ == attachment && std::chrono::steady_clock::now() >= deadline) return false;
      pause = std::min(2 * pause, std::chrono::milliseconds(50));
    }
  }
  LogInfo("link_detached", {{"pid", LogValue(current_->pid)}});
  current_.reset();
  return true;
}

void LinkLoop::Impl::ControlMain() {
  pthread_setname_np(pthread_self(), "link-control");
  while (true) {
    pollfd entries[4] = {{.fd = listener_.get(), .events = POLLIN, .revents = 0},
                         {.fd = wake_.get(), .events = POLLIN, .revents = 0},
                         {.fd = -1, .events = POLLIN | POLLRDHUP, .revents = 0},
                         {.fd = -1, .events = POLLIN, .revents = 0}};
    int timeout_ms = -1;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      if (current_.has_value() && current_->attachment->ended()) {
        timeout_ms = kLeavePollMs;  // its descriptors say nothing new
      } else if (current_.has_value()) {
        entries[2].fd = current_->socket.get();
        entries[3].fd = current_->pidfd.get();
      }
    }
    if (poll(entries, 4, timeout_ms) < 0) continue;
    if (entries[1].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      // An Offer may have replaced the attachment whose descriptors were polled: ask the present
      // one.
      const bool gone = current_.has_value() &&
                        (current_->attachment->ended() || shm::PeerHungUp(current_->socket.get()) ||
                         shm::ProcessEnded(current_->pidfd.get()));
      if (gone) DropCurrent(std::chrono::milliseconds(kLeavePollMs));
    }
    if (entries[0].revents != 0) {
      const absl::Status status = AcceptPeer();
      if (!status.ok()) LogWarn("link_refused", {{"reason", status.ToString()}});
    }
  }
}

absl::Status LinkLoop::Impl::Refuse(int socket_fd, shm::HandoverRefusal refusal) {
  shm::Welcome welcome{};
  welcome.magic = shm::kWelcomeMagic;
  welcome.version = shm::kLinkVersion;
  welcome.refusal = static_cast<uint32_t>(refusal);
  shm::SendAll(socket_fd, &welcome, sizeof(welcome),
               std::chrono::steady_clock::now() + kHandoverTimeout)
      .IgnoreError();
  return absl::PermissionDeniedError("the peer's hello was refused, code " +
                                     std::to_string(welcome.refusal));
}

absl::Status LinkLoop::Impl::AcceptPeer() {
  Current current;
  ASSIGN_OR_RETURN(current.socket, shm::AcceptUnix(listener_.get()));
  const int fd = current.socket.get();
  ASSIGN_OR_RETURN(current.pid, shm::CheckPeer(fd));
  const auto deadline = std::chrono::steady_clock::now() + kHandoverTimeout;
  shm::Hello hello;
  RETURN_IF_ERROR(shm::ReceiveAll(fd, &hello, sizeof(hello), deadline));
  current.pidfd = shm::OpenPidfd(current.pid);
  RETURN_IF_ERROR(Claim(hello, fd, &current));
  shm::Confirm confirm;
  RETURN_IF_ERROR(shm::ReceiveAll(fd, &confirm, sizeof(confirm), deadline));
  if (confirm.magic != shm::kConfirmMagic || confirm.epoch != hello.epoch) {
    return absl::DataLossError("the peer's confirmation is malformed");
  }
  Publish(std::move(current));
  return absl::OkStatus();
}

// Takes the pending offer for this peer, makes the attachment and sends the segment.
absl::Status LinkLoop::Impl::Claim(const shm::Hello& hello, int socket_fd, Current* current) {
  shm::Welcome welcome{};
  shm::UniqueFd weights;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!pending_.has_value()) return Refuse(socket_fd, shm::HandoverRefusal::kBadTicket);
    const shm::HandoverRefusal refusal = shm::CheckHello(hello, epoch_, pending_->nonce);
    if (refusal != shm::HandoverRefusal::kAccepted) return Refuse(socket_fd, refusal);
    current->withdrawals = withdrawals_;
    welcome.model_hash = pending_->model_hash;
    if (hello.wants_weights == 1) weights = std::move(pending_->weights);
    const std::vector<int> gpu_cpus = shm::CpusOf(hello.threads);
    const auto wish = options_.placement != shm::Placement::kAuto
                          ? options_.placement
                          : static_cast<shm::Placement>(hello.placement);
    LinkAttachment::Options options;
    options.epoch = epoch_;
    options.placement = shm::ResolvePlacement(wish, gpu_cpus, options_.thread_cpus, OnlineCpus());
    options.pairs = shm::MakePairs(options.placement, gpu_cpus, options_.thread_cpus);
    options.threads = threads();
    options.peer_deadline = options_.peer_deadline;
    options.spin = options_.spin;
    options.tracks = options_.tracks;
    options.on_end = [this] { Wake(); };
    current->attachment =
        std::make_shared<LinkAttachment>(std::move(pending_->segment), std::move(options));
    pending_.reset();
  }
  LinkAttachment& attachment = *current->attachment;
  shm::Segment& segment = attachment.segment();
  shm::LifeLock::Options life;
  life.own = &segment.view().control()->expert_life;
  life.peer = &segment.view().control()->gpu_life;
  life.on_peer_gone = [&attachment] { attachment.End(); };
  current->life = std::make_unique<shm::LifeLock>(std::move(life));
  if (!current->life->held()) {
    return Refuse(socket_fd, shm::HandoverRefusal::kNotReady);
  }
  welcome.magic = shm::kWelcomeMagic;
  welcome.version = shm::kLinkVersion;
  welcome.refusal = static_cast<uint32_t>(shm::HandoverRefusal::kAccepted);
  welcome.epoch = hello.epoch;
  welcome.segment_bytes = segment.mapped_bytes();
  welcome.limits = segment.view().layout().limits;
  welcome.slots = segment.view().layout().slots;
  welcome.placement = static_cast<uint32_t>(attachment.colocated() ? shm::Placement::kColocated
                                                                   : shm::Placement::kApart);
  welcome.threads = shm::MakeThreadList(options_.thread_cpus);
  welcome.has_weights = weights.valid() ? 1 : 0;
  const auto deadline = std::chrono::steady_clock::now() + kHandoverTimeout;
  RETURN_IF_ERROR(shm::SendWithFd(socket_fd, &welcome, sizeof(welcome), segment.fd(), deadline));
  segment.ReleaseFd();
  if (!weights.valid()) return absl::OkStatus();
  const shm::Weights message{.magic = shm::kWeightsMagic, .epoch = hello.epoch};
  return shm::SendWithFd(socket_fd, &message, sizeof(message), weights.get(), deadline);
}

void LinkLoop::Impl::Publish(Current current) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (current.withdrawals != withdrawals_) return;
  current.life->Watch();
  LogInfo("link_attached", {{"pid", LogValue(current.pid)},
                            {"epoch", LogValue(epoch_)},
                            {"placement", current.attachment->colocated() ? "colocated" : "apart"},
                            {"pages", current.attachment->segment().page_kind()},
                            {"bytes", LogValue(current.attachment->segment().mapped_bytes())}});
  attachments_.fetch_add(1, std::memory_order_relaxed);
  current_.emplace(std::move(current));
  const std::lock_guard<std::mutex> team(team_mutex_);
  offered_ = current_->attachment;
  team_changed_.notify_all();
}

// ---------------------------------------------------------------- LinkLoop

LinkLoop::LinkLoop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LinkLoop::~LinkLoop() = default;

absl::StatusOr<std::unique_ptr<LinkLoop>> LinkLoop::Start(const Options& options,
                                                          shm::BatchHandler* handler) {
  if (options.thread_cpus.empty() || options.thread_cpus.size() > shm::kMaxThreads) {
    return absl::InvalidArgumentError("link: 1 to 512 compute threads are possible");
  }
  ASSIGN_OR_RETURN(shm::UniqueFd listener, shm::ListenUnix(options.socket_path));
  shm::UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid())
    return absl::ResourceExhaustedError("link: no descriptor for the control loop");
  return std::unique_ptr<LinkLoop>(
      new LinkLoop(std::make_unique<Impl>(options, handler, std::move(listener), std::move(wake))));
}

absl::StatusOr<shm::LinkTicket> LinkLoop::Offer(const AttachSpec& spec) {
  return impl_->Offer(spec);
}
void LinkLoop::RunThread(int thread) { impl_->RunThread(thread); }
void LinkLoop::Detach() { impl_->Detach(); }
void LinkLoop::Stop() { impl_->Stop(); }
LinkLoop::State LinkLoop::state() const { return impl_->state(); }

}  // namespace tandem::expert
