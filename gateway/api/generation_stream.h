#pragma once

// The events of all choices of one client request, between the engine's threads (which must not
// wait) and the front end's writer (which waits for its client). Both front ends use it.
//
//   auto stream = std::make_shared<GenerationStream>(engine, options);
//   stream->SetWakeup([...] { ... });            // called when Pop has something new
//   RETURN_IF_ERROR(stream->Start(std::move(requests)));
//   while (auto item = stream->Pop()) ...        // until stream->Done()
//   stream->Close();                             // always; cancels what still runs
//
// Backpressure: while the writer is busy, events of one choice merge into one, so the queue holds
// at most one event a choice (and its error); when the unread events exceed `max_buffered_bytes`,
// the client is too slow: its choices are cancelled and Pop returns one RESOURCE_EXHAUSTED error.
//
// Thread safety: all methods from any thread. The wakeup runs on an engine thread, or in the thread
// that calls Start, without locks held; after Close returns, or while it runs, a last call may
// still be under way, so it must own what it touches.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "gateway/engine.h"

namespace tandem::gateway {

// The error that an event tells its client; OK for all that is not one. A cancellation that a
// client lives to see is the server's.
absl::Status EventError(const GenerationEvent& event);

struct GenerationStreamOptions {
  size_t max_buffered_bytes = size_t{1} << 20;
};

class GenerationStream : public std::enable_shared_from_this<GenerationStream> {
 public:
  struct Item {
    size_t choice = 0;
    GenerationEvent event;
  };

  GenerationStream(Engine* engine, GenerationStreamOptions options);

  void SetWakeup(std::function<void()> wakeup);

  // Submits all choices. On an error those already submitted are cancelled and the error returned.
  absl::Status Start(std::vector<GenerationRequest> requests);

  std::optional<Item> Pop();
  // Every choice's last event has been popped.
  bool Done() const;

  // The client was too slow and its choices have been cancelled.
  bool Overflowed() const;

  // Ends the wakeups and cancels the choices that still run. Idempotent.
  void Close();

 private:
  class Listener;
  struct Choice {
    std::optional<uint64_t> handle;  // once Submit has returned
    bool finished = false;           // the engine's last event has come
    bool delivered = false;          // ... and has been popped
  };

  void OnEvent(size_t choice, GenerationEvent event);
  void MergeOrQueue(size_t choice, GenerationEvent event);
  void CancelRunning();

  Engine* const engine_;
  const GenerationStreamOptions options_;

  mutable std::mutex mutex_;
  std::function<void()> wakeup_;
  std::vector<Choice> choices_;
  std::deque<Item> queue_;
  size_t queued_bytes_ = 0;
  bool cancelled_ = false;
  bool overflowed_ = false;
};

}  // namespace tandem::gateway
