#include "gateway/api/http_server.h"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gateway/api/http_session.h"

namespace tandem::gateway {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
// After a failed accept (no file descriptors left), so as not to spin.
constexpr std::chrono::milliseconds kAcceptPause{100};

// The answer to a connection over the limit; it gets no session of its own.
std::string TooManyConnections(HttpHandler* handler) {
  const HttpResponse response = handler->ErrorResponse(503, "Too many connections are open.");
  return absl::StrCat("HTTP/1.1 503 Service Unavailable\r\nContent-Type: ", response.content_type,
                      "\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: ",
                      response.body.size(), "\r\n\r\n", response.body);
}

}  // namespace

struct HttpServer::State {
  HttpSessionContext context;
  asio::io_context io;
  std::optional<tcp::acceptor> acceptor;
  int port = 0;
  std::vector<std::thread> threads;

  std::mutex mutex;
  std::condition_variable changed;
  std::list<std::weak_ptr<HttpSession>> sessions;

  absl::Status Listen();
  asio::awaitable<void> Accept();
  asio::awaitable<void> Serve(std::shared_ptr<HttpSession> session);
  void CloseSessions(HttpSession::CloseOptions options);
  size_t SessionCount() {
    const std::lock_guard lock(mutex);
    return sessions.size();
  }
};

absl::Status HttpServer::State::Listen() {
  boost::system::error_code error;
  const auto address = asio::ip::make_address(context.options.host, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("host ", context.options.host, " is not an IP address"));
  }
  const tcp::endpoint endpoint(address, static_cast<uint16_t>(context.options.port));
  acceptor.emplace(asio::make_strand(io));
  acceptor->open(endpoint.protocol(), error);
  // Connections of a predecessor in TIME_WAIT must not keep the port.
  if (!error) acceptor->set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor->bind(endpoint, error);
  if (!error) acceptor->listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("port ", context.options.port, " of ",
                                               context.options.host,
                                               " cannot be bound: ", error.message()));
  }
  port = acceptor->local_endpoint().port();
  return absl::OkStatus();
}

asio::awaitable<void> HttpServer::State::Accept() {
  asio::steady_timer pause(acceptor->get_executor());
  while (acceptor->is_open()) {
    tcp::socket socket(asio::make_strand(io));
    const auto [error] = co_await acceptor->async_accept(socket, kAwait);
    if (error == asio::error::operation_aborted || error == asio::error::bad_descriptor) co_return;
    if (error) {
      LogWarn("http_accept_failed", {{"error", error.message()}});
      pause.expires_after(kAcceptPause);
      co_await pause.async_wait(kAwait);
      continue;
    }
    boost::system::error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    socket.non_blocking(true, ignored);
    if (SessionCount() >= context.options.max_connections) {
      const std::string answer = TooManyConnections(context.handler);
      socket.write_some(asio::buffer(answer), ignored);
      continue;
    }
    const auto executor = socket.get_executor();
    auto session = std::make_shared<HttpSession>(std::move(socket), &context);
    asio::co_spawn(executor, Serve(std::move(session)), asio::detached);
  }
}

asio::awaitable<void> HttpServer::State::Serve(std::shared_ptr<HttpSession> session) {
  std::list<std::weak_ptr<HttpSession>>::iterator place;
  {
    const std::lock_guard lock(mutex);
    place = sessions.insert(sessions.end(), session);
  }
  co_await session->Run();
  const std::lock_guard lock(mutex);
  sessions.erase(place);
  changed.notify_all();
}

void HttpServer::State::CloseSessions(HttpSession::CloseOptions options) {
  const std::lock_guard lock(mutex);
  for (const auto& entry : sessions) {
    if (const auto session = entry.lock()) session->Close(options);
  }
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpServerOptions options,
                                                              HttpHandler* handler) {
  auto state = std::make_unique<State>();
  state->context.options = std::move(options);
  state->context.handler = handler;
  RETURN_IF_ERROR(state->Listen());
  asio::co_spawn(state->acceptor->get_executor(), state->Accept(), asio::detached);
  for (int i = 0; i < state->context.options.io_threads; ++i) {
    state->threads.emplace_back([io = &state->io] { io->run(); });
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(state)));
}

HttpServer::HttpServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

HttpServer::~HttpServer() {
  StopAccepting();
  state_->CloseSessions({.force = true});
  // Their requests end by disconnection; what does not in this time is abandoned.
  WaitUntilIdle(std::chrono::seconds(5));
  state_->io.stop();
  for (std::thread& thread : state_->threads) thread.join();
}

int HttpServer::port() const { return state_->port; }

uint32_t HttpServer::open_connections() const {
  return static_cast<uint32_t>(state_->SessionCount());
}

void HttpServer::StopAccepting() {
  state_->context.draining = true;
  asio::post(state_->acceptor->get_executor(), [state = state_.get()] {
    boost::system::error_code ignored;
    state->acceptor->close(ignored);
  });
  state_->CloseSessions({});
}

bool HttpServer::WaitUntilIdle(std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, timeout, [&] { return state_->sessions.empty(); });
}

}  // namespace tandem::gateway
