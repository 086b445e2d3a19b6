#include "gateway/api/generation_stream.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tandem::gateway {
namespace {

size_t LogprobBytes(const std::vector<TokenLogprob>& logprobs) {
  size_t bytes = 0;
  for (const TokenLogprob& logprob : logprobs) {
    bytes += sizeof(TokenLogprob) + logprob.top.size() * sizeof(TopLogprob);
  }
  return bytes;
}

size_t EventBytes(const GenerationEvent& event) {
  return event.text.size() + event.token_ids.size() * sizeof(uint32_t) +
         LogprobBytes(event.logprobs) + LogprobBytes(event.prompt_logprobs);
}

template <typename T>
void MoveAppend(std::vector<T>&& from, std::vector<T>* to) {
  to->insert(to->end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

// Appends `next` to `event`; what is cumulative in events is taken from the newer one.
void Merge(GenerationEvent next, GenerationEvent* event) {
  next.text.insert(0, event->text);
  std::swap(next.token_ids, event->token_ids);
  MoveAppend(std::move(event->token_ids), &next.token_ids);
  std::swap(next.logprobs, event->logprobs);
  MoveAppend(std::move(event->logprobs), &next.logprobs);
  std::swap(next.prompt_logprobs, event->prompt_logprobs);
  MoveAppend(std::move(event->prompt_logprobs), &next.prompt_logprobs);
  *event = std::move(next);
}

}  // namespace

absl::Status EventError(const GenerationEvent& event) {
  if (event.reason == FinishReason::kError) {
    return event.error.ok() ? absl::InternalError("generation failed") : event.error;
  }
  if (event.reason == FinishReason::kCancelled) {
    return absl::UnavailableError("The generation was ended by the server.");
  }
  return absl::OkStatus();
}

class GenerationStream::Listener final : public GenerationListener {
 public:
  Listener(std::shared_ptr<GenerationStream> stream, size_t choice)
      : stream_(std::move(stream)), choice_(choice) {}
  void OnEvent(GenerationEvent event) override { stream_->OnEvent(choice_, std::move(event)); }

 private:
  const std::shared_ptr<GenerationStream> stream_;
  const size_t choice_;
};

GenerationStream::GenerationStream(Engine* engine, GenerationStreamOptions options)
    : engine_(engine), options_(options) {}

void GenerationStream::SetWakeup(std::function<void()> wakeup) {
  const std::lock_guard lock(mutex_);
  wakeup_ = std::move(wakeup);
}

absl::Status GenerationStream::Start(std::vector<GenerationRequest> requests) {
  {
    const std::lock_guard lock(mutex_);
    choices_.resize(requests.size());
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    absl::StatusOr<uint64_t> handle =
        engine_->Submit(std::move(requests[i]), std::make_shared<Listener>(shared_from_this(), i));
    if (!handle.ok()) {
      Close();
      return handle.status();
    }
    bool cancelled = false;
    {
      const std::lock_guard lock(mutex_);
      choices_[i].handle = *handle;
      cancelled = cancelled_;
    }
    if (cancelled) {
      CancelRunning();
      break;
    }
  }
  return absl::OkStatus();
}

void GenerationStream::OnEvent(size_t choice, GenerationEvent event) {
  std::function<void()> wakeup;
  bool overflow = false;
  {
    const std::lock_guard lock(mutex_);
    choices_[choice].finished = event.finished;
    if (overflowed_) return;
    if (queued_bytes_ > options_.max_buffered_bytes) {
      overflow = overflowed_ = cancelled_ = true;
      GenerationEvent error;
      error.finished = true;
      error.reason = FinishReason::kError;
      error.error = absl::ResourceExhaustedError("The client reads too slowly.");
      queue_.clear();
      queue_.push_back({choice, std::move(error)});
    } else {
      MergeOrQueue(choice, std::move(event));
    }
    wakeup = wakeup_;
  }
  if (overflow) CancelRunning();
  if (wakeup) wakeup();
}

void GenerationStream::MergeOrQueue(size_t choice, GenerationEvent event) {
  queued_bytes_ += EventBytes(event);
  const auto queued = std::find_if(queue_.begin(), queue_.end(),
                                   [&](const Item& item) { return item.choice == choice; });
  // An error stays apart, so that what was generated before it is still delivered.
  if (queued == queue_.end() || !EventError(event).ok()) {
    queue_.push_back({choice, std::move(event)});
  } else {
    Merge(std::move(event), &queued->event);
  }
}

std::optional<GenerationStream::Item> GenerationStream::Pop() {
  const std::lock_guard lock(mutex_);
  if (queue_.empty()) return std::nullopt;
  Item item = std::move(queue_.front());
  queue_.pop_front();
  queued_bytes_ -= std::min(queued_bytes_, EventBytes(item.event));
  if (item.event.finished) choices_[item.choice].delivered = true;
  return item;
}

bool GenerationStream::Done() const {
  const std::lock_guard lock(mutex_);
  if (overflowed_) return queue_.empty();
  return std::all_of(choices_.begin(), choices_.end(),
                     [](const Choice& choice) { return choice.delivered; });
}

bool GenerationStream::Overflowed() const {
  const std::lock_guard lock(mutex_);
  return overflowed_;
}

void GenerationStream::Close() {
  {
    const std::lock_guard lock(mutex_);
    wakeup_ = nullptr;
    cancelled_ = true;
  }
  CancelRunning();
}

void GenerationStream::CancelRunning() {
  std::vector<uint64_t> running;
  {
    const std::lock_guard lock(mutex_);
    for (const Choice& choice : choices_) {
      if (choice.handle && !choice.finished) running.push_back(*choice.handle);
    }
  }
  // Without the lock: the engine may answer with the last event from inside Cancel.
  for (const uint64_t handle : running) engine_->Cancel(handle);
}

}  // namespace tandem::gateway
