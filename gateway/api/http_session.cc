#include "gateway/api/http_session.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/read.hpp>
#include <cctype>
#include <ctime>
#include <exception>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"

namespace tandem::gateway {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
// Beside a header of 16 KiB there is room for what arrives behind it.
constexpr size_t kReadBytes = 16 << 10;
constexpr size_t kBufferBytes = 64 << 10;
// A client that is told 413 while it still sends gets so long to read the answer before a reset.
constexpr std::chrono::seconds kDiscardTime{10};

std::string HttpDate() {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  gmtime_r(&now, &utc);
  char text[64];
  const size_t length = std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  return std::string(text, length);
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string PathOf(std::string_view target) {
  target = target.substr(0, target.find('?'));
  std::string path;
  for (size_t i = 0; i < target.size(); ++i) {
    const bool escape = target[i] == '%' && i + 2 < target.size();
    const int high = escape ? HexDigit(target[i + 1]) : -1;
    const int low = escape ? HexDigit(target[i + 2]) : -1;
    if (high >= 0 && low >= 0) {
      path += static_cast<char>(high * 16 + low);
      i += 2;
    } else {
      path += target[i];
    }
  }
  return path;
}

// What a parse error means to the client: 0 where the connection simply ended. A time-out has
// closed the socket already.
int StatusOf(beast::error_code error) {
  if (error == http::error::end_of_stream || error == asio::error::operation_aborted ||
      error == asio::error::connection_reset || error == asio::error::eof ||
      error == beast::error::timeout) {
    return 0;
  }
  if (error == http::error::body_limit) return 413;
  if (error == http::error::header_limit || error == http::error::buffer_overflow) return 431;
  return error.category() == http::make_error_code(http::error::bad_method).category() ? 400 : 0;
}

std::string_view MessageOf(int status) {
  switch (status) {
    case 413:
      return "The request body is too large.";
    case 431:
      return "The request header is too large.";
    default:
      return "The request is not valid HTTP.";
  }
}

}  // namespace

HttpSession::HttpSession(asio::ip::tcp::socket socket, HttpSessionContext* context)
    : context_(context),
      executor_(socket.get_executor()),
      stream_(std::move(socket)),
      buffer_(kBufferBytes) {}

asio::awaitable<void> HttpSession::Run() {
  const auto self = shared_from_this();
  try {
    while (co_await ReadRequest()) {
      co_await context_->handler->Handle(*this);
      request_ = {};
      if (!keep_alive_ || disconnected_ || context_->draining) break;
    }
    if (unread_body_) co_await Discard();
  } catch (const std::exception& error) {
    LogError("http_connection_failed", {{"error", error.what()}});
  }
  beast::error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  stream_.close();
}

void HttpSession::Close(CloseOptions options) {
  asio::post(executor_, [self = shared_from_this(), options] {
    if (options.force || self->waiting_) self->stream_.close();
  });
}

asio::awaitable<bool> HttpSession::AwaitFirstBytes() {
  if (buffer_.size() > 0) co_return true;
  waiting_ = true;
  stream_.expires_after(context_->options.idle_timeout);
  const auto space = buffer_.prepare(kReadBytes);
  const auto [error, bytes] = co_await stream_.async_read_some(space, kAwait);
  waiting_ = false;
  if (error) co_return false;
  buffer_.commit(bytes);
  co_return true;
}

asio::awaitable<bool> HttpSession::ReadRequest() {
  for (;;) {
    if (!co_await AwaitFirstBytes()) co_return false;
    parser_.emplace();
    parser_->header_limit(context_->options.header_limit_bytes);
    parser_->body_limit(context_->options.body_limit_bytes);
    stream_.expires_after(context_->options.header_timeout);
    const auto [error, bytes] =
        co_await http::async_read_header(stream_, buffer_, *parser_, kAwait);
    if (error) {
      request_ = {};
      co_await Refuse(error);
      co_return false;
    }
    TakeHead();
    std::optional<HttpResponse> refusal = context_->handler->Admit(request_);
    if (!refusal) break;
    if (!parser_->is_done()) {
      keep_alive_ = false;
      unread_body_ = true;
    }
    HttpResponse response = *std::move(refusal);
    co_await Respond(std::move(response));
    if (!keep_alive_) co_return false;
  }
  co_return co_await ReadBody();
}

void HttpSession::TakeHead() {
  const auto& message = parser_->get();
  request_ = {};
  request_.method = std::string(message.method_string());
  request_.path = PathOf({message.target().data(), message.target().size()});
  for (const auto& field : message) {
    std::string name(field.name_string());
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    request_.headers.emplace_back(std::move(name), std::string(field.value()));
  }
  keep_alive_ = parser_->keep_alive();
  chunked_ = message.version() >= 11;
}

asio::awaitable<bool> HttpSession::ReadBody() {
  if (!parser_->is_done()) {
    if (beast::iequals(parser_->get()[http::field::expect], "100-continue")) {
      std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
      if (!co_await Send(std::move(go_on))) co_return false;
    }
    stream_.expires_after(context_->options.body_timeout);
    const auto [error, bytes] = co_await http::async_read(stream_, buffer_, *parser_, kAwait);
    if (error) {
      co_await Refuse(error);
      co_return false;
    }
  }
  request_.body = std::move(parser_->get().body());
  co_return true;
}

asio::awaitable<void> HttpSession::Refuse(beast::error_code error) {
  const int status = StatusOf(error);
  if (status == 0) co_return;
  keep_alive_ = false;
  unread_body_ = true;
  HttpResponse response = context_->handler->ErrorResponse(status, MessageOf(status));
  co_await Respond(std::move(response));
}

std::string HttpSession::Head(const HttpResponse& response, std::string_view framing) {
  if (context_->draining) keep_alive_ = false;
  const auto reason = http::obsolete_reason(static_cast<http::status>(response.status));
  std::string head = absl::StrCat("HTTP/1.1 ", response.status, " ", std::string(reason),
                                  "\r\nDate: ", HttpDate(), "\r\n");
  if (!response.content_type.empty()) {
    absl::StrAppend(&head, "Content-Type: ", response.content_type, "\r\n");
  }
  for (const auto& [name, value] : response.headers) {
    absl::StrAppend(&head, name, ": ", value, "\r\n");
  }
  absl::StrAppend(&head, "Connection: ", keep_alive_ ? "keep-alive" : "close", "\r\n",
                  std::string(framing), "\r\n");
  return head;
}

asio::awaitable<bool> HttpSession::Send(std::string data) {
  stream_.expires_after(context_->options.write_timeout);
  const auto buffer = asio::buffer(data);
  const auto [error, bytes] = co_await asio::async_write(stream_, buffer, kAwait);
  stream_.expires_never();
  if (error) {
    keep_alive_ = false;
    disconnected_ = true;
  }
  co_return !error;
}

asio::awaitable<void> HttpSession::Respond(HttpResponse response) {
  std::string text =
      Head(response, response.status == 204
                         ? std::string()
                         : absl::StrCat("Content-Length: ", response.body.size(), "\r\n"));
  if (request_.method != "HEAD") text += response.body;
  co_await Send(std::move(text));
}

asio::awaitable<bool> HttpSession::StartStream(HttpResponse response) {
  if (!chunked_) keep_alive_ = false;
  std::string head = Head(response, chunked_ ? "Transfer-Encoding: chunked\r\n" : "");
  co_return co_await Send(std::move(head));
}

asio::awaitable<bool> HttpSession::Write(std::string_view data) {
  // An empty chunk would end the response.
  if (data.empty()) co_return true;
  std::string framed;
  if (chunked_) {
    framed = absl::StrCat(absl::Hex(data.size()), "\r\n", std::string(data), "\r\n");
  } else {
    framed = std::string(data);
  }
  co_return co_await Send(std::move(framed));
}

asio::awaitable<void> HttpSession::EndStream() {
  std::string last_chunk = "0\r\n\r\n";
  if (chunked_) co_await Send(std::move(last_chunk));
}

bool HttpSession::ClientIsGone() {
  char byte;
  const ssize_t got = ::recv(stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

// Ends when the client has closed or reset the connection, or when it is cancelled.
asio::awaitable<void> HttpSession::WatchClient() {
  co_await asio::this_coro::throw_if_cancelled(false);
  asio::steady_timer forever(executor_, asio::steady_timer::time_point::max());
  for (;;) {
    // A client may send its next request early; it is kept for later, up to the buffer's size.
    if (buffer_.size() + kReadBytes > buffer_.max_size()) {
      co_await forever.async_wait(kAwait);
      co_return;
    }
    const auto wait = asio::ip::tcp::socket::wait_read;
    const auto [error] = co_await stream_.socket().async_wait(wait, kAwait);
    const auto state = co_await asio::this_coro::cancellation_state;
    if (state.cancelled() != asio::cancellation_type::none) co_return;
    if (error || ClientIsGone()) {
      disconnected_ = true;
      co_return;
    }
    beast::error_code read_error;
    const auto space = buffer_.prepare(kReadBytes);
    buffer_.commit(stream_.socket().read_some(space, read_error));
    if (read_error && read_error != asio::error::would_block) {
      disconnected_ = true;
      co_return;
    }
  }
}

asio::awaitable<void> HttpSession::UntilDisconnect(asio::awaitable<void> work) {
  using asio::experimental::awaitable_operators::operator||;
  stream_.expires_never();
  asio::awaitable<void> watch = WatchClient();
  auto both = std::move(work) || std::move(watch);
  co_await std::move(both);
}

asio::awaitable<void> HttpSession::Discard() {
  beast::error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  buffer_.clear();
  stream_.expires_after(kDiscardTime);
  uint64_t left = 2 * context_->options.body_limit_bytes;
  const auto space = buffer_.prepare(kReadBytes);
  while (left > 0) {
    const auto [error, bytes] = co_await stream_.async_read_some(space, kAwait);
    if (error) co_return;
    left -= std::min<uint64_t>(left, bytes);
  }
}

}  // namespace tandem::gateway
