#pragma once

// One connection of the HTTP server: reads requests one after another, lets the handler answer
// them, keeps the limits. Lives on its strand; owned by its own coroutine (shared with the server's
// list of connections as a weak pointer).

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <memory>
#include <optional>
#include <string>

#include "gateway/api/http_server.h"

namespace tandem::gateway {

// What connections share with their server.
struct HttpSessionContext {
  HttpServerOptions options;
  HttpHandler* handler = nullptr;
  std::atomic<bool> draining{false};
};

class HttpSession final : public HttpExchange, public std::enable_shared_from_this<HttpSession> {
 public:
  // `socket`'s executor is the connection's strand.
  HttpSession(boost::asio::ip::tcp::socket socket, HttpSessionContext* context);

  // Serves the connection to its end.
  boost::asio::awaitable<void> Run();
  // From any thread: closes the connection if it waits for a request, or anyway with `force`.
  struct CloseOptions {
    bool force = false;
  };
  void Close(CloseOptions options);

  const HttpRequest& request() const override { return request_; }
  std::string TakeBody() override { return std::move(request_.body); }
  boost::asio::any_io_executor executor() const override { return executor_; }
  boost::asio::awaitable<void> Respond(HttpResponse response) override;
  boost::asio::awaitable<bool> StartStream(HttpResponse response) override;
  boost::asio::awaitable<bool> Write(std::string_view data) override;
  boost::asio::awaitable<void> EndStream() override;
  void CloseAfterwards() override { keep_alive_ = false; }
  boost::asio::awaitable<void> UntilDisconnect(boost::asio::awaitable<void> work) override;
  bool disconnected() const override { return disconnected_; }

 private:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  boost::asio::awaitable<bool> ReadRequest();
  boost::asio::awaitable<bool> AwaitFirstBytes();
  boost::asio::awaitable<bool> ReadBody();
  boost::asio::awaitable<void> Refuse(boost::beast::error_code error);
  boost::asio::awaitable<void> WatchClient();
  boost::asio::awaitable<void> Discard();
  boost::asio::awaitable<bool> Send(std::string data);
  void TakeHead();
  std::string Head(const HttpResponse& response, std::string_view framing);
  bool ClientIsGone();

  HttpSessionContext* const context_;
  boost::asio::any_io_executor executor_;
  boost::beast::tcp_stream stream_;
  boost::beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  HttpRequest request_;
  bool waiting_ = true;  // for the first byte of a request
  bool keep_alive_ = true;
  bool chunked_ = false;  // how the streamed response is framed
  bool unread_body_ = false;
  bool disconnected_ = false;
};

}  // namespace tandem::gateway
