#pragma once

// Private to openai_api*.cc: the state of one HTTP call.

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gateway/api/openai_api.h"

namespace tandem::gateway {

struct OpenAiApi::Call {
  std::string request_id;
  std::string tenant;
  Route route;
  std::string path;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  int status = 200;  // as counted and logged; 499: the client left
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;
};

// Lets a coroutine wait for something that happens on other threads. Wait and Close are called from
// the executor's strand, by one waiter; Notify from any thread, and it may come late: an engine
// thread may hold the signal for longer than the server that the executor belongs to lives, so the
// waiter closes it, after which nothing of the executor is touched.
class StreamSignal : public std::enable_shared_from_this<StreamSignal> {
 public:
  explicit StreamSignal(boost::asio::any_io_executor executor) : timer_(std::move(executor)) {}

  void Notify() {
    const std::lock_guard lock(mutex_);
    if (!timer_) return;
    boost::asio::post(timer_->get_executor(), [self = shared_from_this()] {
      self->notified_ = true;
      if (self->timer_) self->timer_->cancel();
    });
  }

  // Whether a notification came before `deadline` (cancellation looks like a deadline).
  boost::asio::awaitable<bool> Wait(std::chrono::steady_clock::time_point deadline) {
    if (!notified_) {
      timer_->expires_at(deadline);
      co_await timer_->async_wait(boost::asio::as_tuple(boost::asio::use_awaitable));
    }
    co_return std::exchange(notified_, false);
  }

  void Close() {
    const std::lock_guard lock(mutex_);
    timer_.reset();
  }

 private:
  std::mutex mutex_;  // of timer_ against Close; it changes on the strand only
  std::optional<boost::asio::steady_timer> timer_;
  bool notified_ = false;
};

// A prepared generation, then the running one.
struct OpenAiApi::Generation {
  bool stream = false;
  bool include_usage = false;
  std::vector<GenerationRequest> requests;
  std::optional<OpenAiResponse> response;
  std::shared_ptr<GenerationStream> events;
  std::shared_ptr<StreamSignal> signal;
};

HttpResponse JsonResponse(std::string body, std::string_view request_id);
HttpResponse StatusResponse(const absl::Status& status, std::string_view request_id);
HttpResponse ApiErrorResponse(const ApiError& error, std::string_view request_id);

}  // namespace tandem::gateway
