// The HTTP server itself: framing, limits, time-outs, restart.

#include "gateway/api/http_server.h"

#include <gmock/gmock.h>

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gateway/api/http_client.h"

namespace tandem::gateway {
namespace {

using ::testing::HasSubstr;

// Answers with what it got: "METHOD PATH BODY".
class EchoHandler final : public HttpHandler {
 public:
  std::optional<HttpResponse> Admit(const HttpRequest& head) override {
    if (head.path == "/refused") return ErrorResponse(401, "refused");
    return std::nullopt;
  }
  boost::asio::awaitable<void> Handle(HttpExchange& exchange) override {
    const HttpRequest& request = exchange.request();
    HttpResponse response;
    response.body = absl::StrCat(request.method, " ", request.path, " ", request.body);
    response.content_type = "text/plain";
    co_await exchange.Respond(std::move(response));
  }
  HttpResponse ErrorResponse(int status, std::string_view message) override {
    HttpResponse response;
    response.status = status;
    response.body = std::string(message);
    return response;
  }
};

class HttpServerTest : public testing::Test {
 protected:
  void Start(HttpServerOptions options) {
    auto server = HttpServer::Start(std::move(options), &handler_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  int port() const { return server_->port(); }

  EchoHandler handler_;
  std::unique_ptr<HttpServer> server_;
};

std::string ChunkedPost(std::string_view body, size_t chunk_bytes) {
  std::string text =
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
      "Trailer: X-Sum\r\n\r\n";
  bool extension = true;
  while (!body.empty()) {
    const std::string_view chunk = body.substr(0, chunk_bytes);
    absl::StrAppend(&text, absl::Hex(chunk.size()), extension ? ";name=\"a b\"" : "", "\r\n",
                    std::string(chunk), "\r\n");
    extension = false;
    body.remove_prefix(chunk.size());
  }
  return text + "0\r\nX-Sum: 1\r\n\r\n";
}

// HC-3: chunked bodies with a chunk extension and a trailer, in chunks of 1, 7 and 64 bytes.
TEST_F(HttpServerTest, Hc3ChunkedBodiesAreReadWhole) {
  Start({});
  const std::string body(300, 'b');
  HttpClient client(port());
  for (const size_t bytes : {size_t{1}, size_t{7}, size_t{64}}) {
    ASSERT_TRUE(client.Send(ChunkedPost(body, bytes)));
    EXPECT_EQ(client.Read().body, "POST /x " + body) << bytes;
  }
}

TEST_F(HttpServerTest, ConnectionIsKeptForPipelinedRequests) {
  Start({});
  HttpClient client(port());
  client.Send(PostText("/a", "1") + GetText("/b?query=1") + PostText("/%63", "3"));
  EXPECT_EQ(client.Read().body, "POST /a 1");
  EXPECT_EQ(client.Read().body, "GET /b ");
  EXPECT_EQ(client.Read().body, "POST /c 3");
  client.Send(GetText("/d", "Connection: close\r\n"));
  EXPECT_EQ(client.Read().Header("connection"), "close");
  EXPECT_TRUE(client.ReadToEnd());
}

TEST_F(HttpServerTest, HeadHasLengthAndNoBody) {
  Start({});
  HttpClient client(port());
  client.Send("HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n" + GetText("/b"));
  const ClientResponse head = client.Read({.head_only = true});
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.Header("content-length"), "8");
  EXPECT_EQ(client.Read().body, "GET /b ");
}

TEST_F(HttpServerTest, ContinueIsSentBeforeTheBody) {
  Start({});
  HttpClient client(port());
  client.Send("POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.Read().status, 100);
  client.Send("ok");
  EXPECT_EQ(client.Read().body, "POST /a ok");
}

TEST_F(HttpServerTest, OversizedBodiesAreRefusedWithTheirClientReading) {
  Start({.body_limit_bytes = 1000});
  // The client sends all of it before it reads, as most do.
  const std::string body(200'000, 'x');
  EXPECT_EQ(Post(port(), "/a", body).status, 413);
  HttpClient chunked(port());
  chunked.Send(ChunkedPost(body, 50'000));
  EXPECT_EQ(chunked.Read().status, 413);
  EXPECT_EQ(Post(port(), "/a", std::string(1000, 'x')).status, 200);
}

TEST_F(HttpServerTest, OversizedAndBrokenHeadersAreRefused) {
  Start({});
  HttpClient large(port());
  large.Send(GetText("/", absl::StrCat("X-Long: ", std::string(20'000, 'x'), "\r\n")));
  EXPECT_EQ(large.Read().status, 431);
  for (const char* broken : {"nonsense\r\n\r\n", "GET / HTTP/9.9\r\n\r\n",
                             "POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                             "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"}) {
    HttpClient client(port());
    client.Send(broken);
    EXPECT_EQ(client.Read().status, 400) << broken;
  }
}

TEST_F(HttpServerTest, RefusalComesBeforeTheBodyIsRead) {
  Start({});
  HttpClient client(port());
  client.Send("POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n");
  EXPECT_EQ(client.Read().status, 401);
}

TEST_F(HttpServerTest, SlowClientsAreDropped) {
  Start({.idle_timeout = std::chrono::milliseconds(200),
         .header_timeout = std::chrono::milliseconds(100),
         .body_timeout = std::chrono::milliseconds(100)});
  HttpClient header(port());
  header.Send("GET / HT");
  EXPECT_TRUE(header.ReadToEnd());
  HttpClient body(port());
  body.Send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab");
  EXPECT_TRUE(body.ReadToEnd());
  HttpClient idle(port());
  EXPECT_TRUE(idle.ReadToEnd());
  EXPECT_EQ(idle.received(), "");
}

TEST_F(HttpServerTest, ConnectionsOverTheLimitGet503) {
  Start({.max_connections = 2});
  HttpClient first(port());
  HttpClient second(port());
  first.Send(GetText("/"));
  second.Send(GetText("/"));
  EXPECT_EQ(first.Read().status, 200);
  EXPECT_EQ(second.Read().status, 200);
  HttpClient third(port());
  EXPECT_EQ(third.Read().status, 503);
  first.Close();
  // The place is free as soon as the server has seen the close.
  int status = 0;
  for (int tries = 0; tries < 1000 && status != 200; ++tries) status = Get(port(), "/").status;
  EXPECT_EQ(status, 200);
}

TEST_F(HttpServerTest, DrainClosesIdleConnectionsOnly) {
  Start({});
  HttpClient idle(port());
  idle.Send(GetText("/"));
  EXPECT_EQ(idle.Read().status, 200);
  server_->StopAccepting();
  EXPECT_TRUE(idle.ReadToEnd());
  EXPECT_TRUE(server_->WaitUntilIdle(std::chrono::seconds(5)));
}

// NU-7: restart at once with open client connections; a port in use is refused by number.
TEST_F(HttpServerTest, Nu7RestartsAtOnceAndNamesAPortInUse) {
  Start({});
  const int kept = port();
  for (int round = 0; round < 10; ++round) {
    std::vector<std::unique_ptr<HttpClient>> clients;
    for (int i = 0; i < 20; ++i) {
      clients.push_back(std::make_unique<HttpClient>(kept));
      clients.back()->Send(GetText("/"));
      EXPECT_EQ(clients.back()->Read().status, 200);
    }
    server_.reset();
    Start({.port = kept});
  }
  const auto second = HttpServer::Start({.port = kept}, &handler_);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(std::to_string(kept)));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("127.0.0.1"));
}

}  // namespace
}  // namespace tandem::gateway
