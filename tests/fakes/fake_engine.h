#pragma once

// An Engine that follows a script instead of a model, for tests of front ends: each request gets
// the script's texts as events (one token each) from a thread of its own, then the script's end.
//
//   FakeEngine engine;
//   engine.SetScript({.texts = {"Hel", "lo"}});
//   ... a request through the front end ...
//   engine.requests();          // what the front end asked for
//
// Thread-safe. The destructor ends all generations.

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gateway/engine.h"

namespace tandem::gateway {

struct FakeScript {
  std::vector<std::string> texts = {"Hello", " world"};
  std::vector<TokenLogprob> prompt_logprobs = {};
  std::vector<TopLogprob> top = {};  // alternatives of every token, where logprobs are asked for
  float logprob = -0.5f;
  FinishReason reason = FinishReason::kStop;
  absl::Status error = {};  // with kError
  std::string matched_stop = {};
  // After the texts: wait for Release or Cancel before the end.
  bool hold = false;
  // The texts again and again, until Cancel.
  bool endless = false;
  absl::Status refuse = {};  // what Submit answers
};

class FakeEngine final : public Engine {
 public:
  FakeEngine() {
    model_.name = "tiny";
    model_.model_type = "fake";
    model_.vocab_size = 1024;
    model_.max_context_tokens = 1024;
    model_.max_logprobs = 20;
    model_.end_ids = {1};
  }
  ~FakeEngine() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  absl::StatusOr<uint64_t> Submit(GenerationRequest request,
                                  std::shared_ptr<GenerationListener> listener) override {
    const std::lock_guard lock(mutex_);
    if (!script_.refuse.ok()) return script_.refuse;
    const uint64_t handle = ++last_handle_;
    requests_.push_back(request);
    running_[handle] = false;
    threads_.emplace_back([this, handle, script = script_, request = std::move(request),
                           listener = std::move(listener)]() mutable {
      Generate(handle, script, request, *listener);
      listener.reset();
      const std::lock_guard ended(mutex_);
      running_.erase(handle);
      changed_.notify_all();
    });
    return handle;
  }

  void Cancel(uint64_t handle) override {
    const std::lock_guard lock(mutex_);
    const auto found = running_.find(handle);
    if (found == running_.end()) return;
    found->second = true;
    ++cancels_;
    changed_.notify_all();
  }

  void FollowServing(std::function<void(bool)>) override {}
  absl::Status Ready() const override {
    const std::lock_guard lock(mutex_);
    return ready_;
  }
  std::optional<ServedModel> Model() const override {
    const std::lock_guard lock(mutex_);
    if (!ready_.ok()) return std::nullopt;
    return model_;
  }
  void Drain(int64_t) override {}

  void SetScript(FakeScript script) {
    const std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  void SetReady(absl::Status ready) {
    const std::lock_guard lock(mutex_);
    ready_ = std::move(ready);
  }
  // Lets generations that are on hold end.
  void Release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

  std::vector<GenerationRequest> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }
  int cancels() const {
    const std::lock_guard lock(mutex_);
    return cancels_;
  }
  // Whether all generations ended within `limit`.
  bool WaitUntilIdle(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return running_.empty(); });
  }
  bool WaitForRequests(size_t count, std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return requests_.size() >= count; });
  }

 private:
  bool Cancelled(uint64_t handle) {
    const std::lock_guard lock(mutex_);
    return closing_ || running_[handle];
  }

  void Generate(uint64_t handle, const FakeScript& script, const GenerationRequest& request,
                GenerationListener& listener) {
    changed_.notify_all();
    GenerationEvent counts;
    counts.prompt_tokens = static_cast<uint32_t>(request.prompt.size());
    do {
      for (const std::string& text : script.texts) {
        if (Cancelled(handle)) break;
        GenerationEvent event = counts;
        event.text = text;
        const uint32_t id = 100 + counts.completion_tokens % 100;
        event.token_ids = {id};
        event.completion_tokens = ++counts.completion_tokens;
        if (request.top_logprobs) event.logprobs = {{id, script.logprob, 1, script.top}};
        if (counts.completion_tokens == 1) event.prompt_logprobs = script.prompt_logprobs;
        listener.OnEvent(std::move(event));
      }
    } while (script.endless && !Cancelled(handle));
    if (script.hold) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return released_ || closing_ || running_[handle]; });
    }
    GenerationEvent last = counts;
    last.finished = true;
    last.reason = Cancelled(handle) ? FinishReason::kCancelled : script.reason;
    last.error = script.error;
    last.matched_stop = script.matched_stop;
    listener.OnEvent(std::move(last));
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  FakeScript script_;
  ServedModel model_;
  absl::Status ready_;
  std::vector<GenerationRequest> requests_;
  std::map<uint64_t, bool> running_;  // handle -> cancelled
  std::vector<std::thread> threads_;
  uint64_t last_handle_ = 0;
  int cancels_ = 0;
  bool released_ = false;
  bool closing_ = false;
};

}  // namespace tandem::gateway
