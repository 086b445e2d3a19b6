#pragma once

// A small HTTP/1.1 server on coroutines: connections, limits, time-outs, keep-alive, chunked bodies
// and streamed responses. What paths mean is the handler's business.
//
//   ASSIGN_OR_RETURN(auto server, HttpServer::Start({.port = 0}, &handler));
//   ... server->port() ...
//   server->StopAccepting();                 // drain: no new connections, idle ones are closed
//   server->WaitUntilIdle(timeout);
//
// Everything a client sends is bounded: header, body, connections, and the time each may take. A
// client that leaves while its request is handled ends UntilDisconnect at once.
//
// Thread safety: Start, StopAccepting, WaitUntilIdle and the destructor from one thread. A handler
// is called from several I/O threads at once, an exchange only from its own connection's strand.
// The handler must outlive the server. A handler must not block: it awaits.

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "gateway/api/http_types.h"

namespace tandem::gateway {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0 picks a free one
  int io_threads = 2;
  uint32_t max_connections = 1024;
  uint32_t header_limit_bytes = 16 << 10;
  uint64_t body_limit_bytes = uint64_t{64} << 20;
  std::chrono::milliseconds idle_timeout{75'000};
  std::chrono::milliseconds header_timeout{10'000};
  std::chrono::milliseconds body_timeout{120'000};
  // One write without progress; a streaming client that does not read is dropped after it.
  std::chrono::milliseconds write_timeout{30'000};
};

// One request and its response.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  virtual const HttpRequest& request() const = 0;
  // Takes the request's body away, to free it while a response is being made.
  virtual std::string TakeBody() = 0;
  virtual boost::asio::any_io_executor executor() const = 0;

  // A whole response. Exactly one of Respond and StartStream is called for a request.
  virtual boost::asio::awaitable<void> Respond(HttpResponse response) = 0;

  // A response of unknown length: its head now, then any number of writes, then the end.
  // `response.body` is ignored. Write returns false once the connection is lost.
  virtual boost::asio::awaitable<bool> StartStream(HttpResponse response) = 0;
  virtual boost::asio::awaitable<bool> Write(std::string_view data) = 0;
  virtual boost::asio::awaitable<void> EndStream() = 0;
  // The connection is closed after this response.
  virtual void CloseAfterwards() = 0;

  // Awaits `work` while it watches the client. If the client leaves, work's pending operation is
  // cancelled and disconnected() turns true; work must return soon then. Returns when work has.
  virtual boost::asio::awaitable<void> UntilDisconnect(boost::asio::awaitable<void> work) = 0;
  virtual bool disconnected() const = 0;
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;

  // Called with the head of a request before its body is read: a response refuses the request.
  virtual std::optional<HttpResponse> Admit(const HttpRequest& head) = 0;
  // REQUIRES: responds exactly once.
  virtual boost::asio::awaitable<void> Handle(HttpExchange& exchange) = 0;
  // The body of an error that the server finds itself (broken or oversized requests, time-outs).
  virtual HttpResponse ErrorResponse(int status, std::string_view message) = 0;
};

class HttpServer {
 public:
  // Errors: UNAVAILABLE naming the address when it is in use, INVALID_ARGUMENT for a bad host.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpServerOptions options,
                                                           HttpHandler* handler);
  // Drops what is still open.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  uint32_t open_connections() const;
  void StopAccepting();
  // Whether all connections ended within `timeout`. REQUIRES: StopAccepting was called.
  bool WaitUntilIdle(std::chrono::milliseconds timeout);

 private:
  struct State;
  explicit HttpServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tandem::gateway
