#include "gateway/serving_engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/engine_board.h"
#include "gateway/engine_core.h"
#include "gateway/engine_metrics.h"
#include "gateway/engine_over_port.h"
#include "gateway/worker_client.h"

namespace tandem::gateway {
namespace {

// The thread goes round at least so often, so that Ready can tell that it does.
constexpr int64_t kLongestWaitNs = 1'000'000'000;
// Beyond this the thread is stuck, not busy: its work is microseconds a step.
constexpr int64_t kStuckNs = 5'000'000'000;

// What other threads leave for the engine thread. Its length is bounded by the open requests
// (admission) and by the worker's answers to at most two steps, drained at every turn.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable filled;
  std::vector<std::unique_ptr<OpenRequest>> submitted;
  std::unordered_set<uint64_t> cancelled;
  std::vector<WorkerEvent> events;
  bool stop = false;

  bool empty() const { return submitted.empty() && cancelled.empty() && events.empty() && !stop; }
};

class ServingEngine final : public Engine {
 public:
  ServingEngine(EngineOptions options, TextSinkFactory text,
                std::shared_ptr<prometheus::Registry> registry, std::shared_ptr<const Clock> clock,
                const WorkerPortFactory& make_port)
      : options_(std::move(options)),
        text_(std::move(text)),
        clock_(std::move(clock)),
        metrics_(std::move(registry)),
        board_(
            {.max_requests = options_.max_queue_requests, .max_tokens = options_.max_queue_tokens}),
        worker_(make_port([this](WorkerEvent event) { Post(std::move(event)); })),
        core_(options_, clock_.get(), &metrics_, &board_, worker_.get()),
        thread_([this] { Run(); }) {}

  ~ServingEngine() override {
    {
      const std::lock_guard lock(mailbox_.mutex);
      mailbox_.stop = true;
    }
    mailbox_.filled.notify_one();
    thread_.join();
  }

  absl::StatusOr<uint64_t> Submit(GenerationRequest request,
                                  std::shared_ptr<GenerationListener> listener) override;
  void Cancel(uint64_t handle) override;
  absl::Status Ready() const override;
  void FollowServing(std::function<void(bool)> listener) override {
    board_.FollowServing(std::move(listener));
  }
  std::optional<ServedModel> Model() const override { return board_.Model(); }
  void Drain(int64_t timeout_ms) override {
    board_.StartDraining();
    board_.WaitUntilEmpty(timeout_ms);
  }

 private:
  void Post(WorkerEvent event) {
    {
      const std::lock_guard lock(mailbox_.mutex);
      mailbox_.events.push_back(std::move(event));
    }
    mailbox_.filled.notify_one();
  }
  void Run();
  // Waits for mail or for `deadline_ns` and empties the mailbox into the core. False: stop.
  bool TakeMail(int64_t deadline_ns);

  const EngineOptions options_;
  const TextSinkFactory text_;
  const std::shared_ptr<const Clock> clock_;
  EngineMetrics metrics_;
  EngineBoard board_;
  Mailbox mailbox_;
  uint64_t next_handle_ = 1;                  // guarded by mailbox_.mutex
  const std::unique_ptr<WorkerPort> worker_;  // used by the engine thread only, like core_
  EngineCore core_;
  std::thread thread_;
};

Rejection RejectionOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return Rejection::kQueueFull;
    case absl::StatusCode::kUnavailable:
      return Rejection::kUnavailable;
    default:
      return Rejection::kInvalid;
  }
}

absl::StatusOr<uint64_t> ServingEngine::Submit(GenerationRequest request,
                                               std::shared_ptr<GenerationListener> listener) {
  absl::Status status = absl::OkStatus();
  if (!text_ && !request.stopping.stop_strings.empty()) {
    status = absl::InvalidArgumentError("stop strings need a tokenizer, which the model lacks");
  }
  if (status.ok()) status = board_.Enter(request);
  if (!status.ok()) {
    metrics_.CountRejection(RejectionOf(status));
    return status;
  }
  std::unique_ptr<TextSink> sink;
  if (text_ && request.detokenize) sink = text_(request);
  uint64_t handle = 0;
  {
    const std::lock_guard lock(mailbox_.mutex);
    handle = next_handle_++;
    mailbox_.submitted.push_back(std::make_unique<OpenRequest>(
        handle, std::move(request), std::move(listener), std::move(sink), clock_->NowNs()));
  }
  mailbox_.filled.notify_one();
  return handle;
}

void ServingEngine::Cancel(uint64_t handle) {
  {
    const std::lock_guard lock(mailbox_.mutex);
    if (handle >= next_handle_) return;
    mailbox_.cancelled.insert(handle);
  }
  mailbox_.filled.notify_one();
}

absl::Status ServingEngine::Ready() const {
  RETURN_IF_ERROR(board_.Ready());
  const int64_t silent_ns = clock_->NowNs() - board_.last_tick_ns();
  if (silent_ns > kStuckNs) {
    return absl::UnavailableError(
        absl::StrCat("the engine makes no progress since ", silent_ns / 1'000'000, " ms"));
  }
  return absl::OkStatus();
}

bool ServingEngine::TakeMail(int64_t deadline_ns) {
  std::vector<std::unique_ptr<OpenRequest>> submitted;
  std::unordered_set<uint64_t> cancelled;
  std::vector<WorkerEvent> events;
  bool stop = false;
  {
    std::unique_lock lock(mailbox_.mutex);
    const int64_t wait_ns = std::clamp<int64_t>(deadline_ns - clock_->NowNs(), 0, kLongestWaitNs);
    mailbox_.filled.wait_for(lock, std::chrono::nanoseconds(wait_ns),
                             [&] { return !mailbox_.empty(); });
    submitted.swap(mailbox_.submitted);
    cancelled.swap(mailbox_.cancelled);
    events.swap(mailbox_.events);
    stop = mailbox_.stop;
  }
  for (auto& request : submitted) core_.Submit(std::move(request));
  for (WorkerEvent& event : events) core_.Handle(std::move(event));
  for (const uint64_t handle : cancelled) core_.Cancel(handle);
  return !stop;
}

void ServingEngine::Run() {
  core_.Tick();
  while (TakeMail(core_.NextDeadlineNs())) {
    core_.Tick();
    core_.DeliverEvents();
  }
  core_.Shutdown();
}

}  // namespace

std::unique_ptr<Engine> MakeEngineOverPort(EngineOptions options, TextSinkFactory text,
                                           std::shared_ptr<prometheus::Registry> registry,
                                           std::shared_ptr<const Clock> clock,
                                           const WorkerPortFactory& make_port) {
  if (!clock) clock = std::make_shared<SteadyClock>();
  return std::make_unique<ServingEngine>(std::move(options), std::move(text), std::move(registry),
                                         std::move(clock), make_port);
}

std::unique_ptr<Engine> MakeEngine(EngineOptions options, TextSinkFactory text,
                                   std::shared_ptr<prometheus::Registry> registry,
                                   std::shared_ptr<const Clock> clock) {
  const WorkerClientOptions client = {.address = options.worker_address,
                                      .model_dir = options.model_dir,
                                      .load_timeout_ms = options.load_timeout_ms};
  return MakeEngineOverPort(std::move(options), std::move(text), std::move(registry),
                            std::move(clock), [&](WorkerEventSink sink) {
                              return std::make_unique<WorkerClient>(client, std::move(sink));
                            });
}

}  // namespace tandem::gateway
