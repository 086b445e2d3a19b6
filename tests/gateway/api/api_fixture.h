#pragma once

// The HTTP and gRPC front ends over a scripted engine and the shipped model's tokenizer and chat
// template. Tests are skipped where that model is absent.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "gateway/api/grpc_server.h"
#include "gateway/api/openai_api.h"
#include "tests/fakes/fake_engine.h"
#include "tests/gateway/api/http_client.h"

namespace tandem::gateway {

// The shipped model's text services, loaded once a process; null members where it is absent.
const Tokenizer* TinyTokenizer();
const ChatTemplate* TinyChatTemplate();

class ApiTest : public testing::Test {
 protected:
  struct Setup {
    std::vector<std::string> keys;
    HttpServerOptions http;
    OpenAiApiOptions api;
    GenerationDefaults defaults = {.temperature = 0.7, .top_p = 0.9};
    bool with_tokenizer = true;
  };

  void SetUp() override;
  void Start(Setup setup);
  int port() const { return http_server_->port(); }

  ClientResponse PostChat(std::string_view body) { return Post(port(), kChatPath, body); }
  ClientResponse PostCompletion(std::string_view body) {
    return Post(port(), kCompletionPath, body);
  }
  // A chat body with one user message and further fields (", \"stop\": ...").
  static std::string Chat(std::string_view more_fields = {});
  static std::string Completion(std::string_view more_fields = {});

  static constexpr std::string_view kChatPath = "/v1/chat/completions";
  static constexpr std::string_view kCompletionPath = "/v1/completions";

  FakeEngine engine_;
  ApiKeys keys_;
  BlockingPool pool_{2};
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  ApiMetrics metrics_{registry_};
  std::unique_ptr<RequestBuilder> builder_;
  std::unique_ptr<OpenAiApi> api_;
  std::unique_ptr<HttpServer> http_server_;
  std::unique_ptr<GrpcServer> grpc_server_;
};

}  // namespace tandem::gateway
