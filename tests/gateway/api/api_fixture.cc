#include "tests/gateway/api/api_fixture.h"

#include <filesystem>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "tests/testing/shared_data.h"

namespace tandem::gateway {
namespace {

std::optional<std::filesystem::path> TinyModel() {
  const std::filesystem::path shipped = tandem::testing::SourceRoot() / "deploy/models/tandem-tiny";
  if (std::filesystem::exists(shipped / "tokenizer.json")) return shipped;
  return tandem::testing::SharedPath("models/tandem-tiny");
}

}  // namespace

const Tokenizer* TinyTokenizer() {
  static const std::unique_ptr<Tokenizer> tokenizer = []() -> std::unique_ptr<Tokenizer> {
    const auto dir = TinyModel();
    if (!dir) return nullptr;
    auto loaded = Tokenizer::Load(*dir);
    TANDEM_CHECK(loaded.ok());
    return *std::move(loaded);
  }();
  return tokenizer.get();
}

const ChatTemplate* TinyChatTemplate() {
  static const std::unique_ptr<ChatTemplate> chat = []() -> std::unique_ptr<ChatTemplate> {
    if (TinyTokenizer() == nullptr) return nullptr;
    auto created =
        ChatTemplate::Create(TinyTokenizer()->config(), TinyTokenizer()->added_tokens(), {});
    TANDEM_CHECK(created.ok());
    return *std::move(created);
  }();
  return chat.get();
}

void ApiTest::SetUp() {
  if (TinyTokenizer() == nullptr) GTEST_SKIP() << "models/tandem-tiny is absent";
  Start({});
}

void ApiTest::Start(Setup setup) {
  http_server_.reset();
  grpc_server_.reset();
  keys_ = ApiKeys(setup.keys);
  builder_ = std::make_unique<RequestBuilder>(
      &engine_, setup.with_tokenizer ? TinyTokenizer() : nullptr,
      setup.with_tokenizer ? TinyChatTemplate() : nullptr, setup.defaults, BuilderLimits{});
  api_ = std::make_unique<OpenAiApi>(
      OpenAiApi::Parts{&engine_, builder_.get(), &keys_, &pool_, &metrics_}, setup.api);
  auto http_server = HttpServer::Start(setup.http, api_.get());
  ASSERT_TRUE(http_server.ok()) << http_server.status();
  http_server_ = *std::move(http_server);
  auto grpc_server = GrpcServer::Start(
      {}, {&engine_, builder_.get(), &keys_, &pool_, &metrics_, setup.api.stream});
  ASSERT_TRUE(grpc_server.ok()) << grpc_server.status();
  grpc_server_ = *std::move(grpc_server);
}

std::string ApiTest::Chat(std::string_view more_fields) {
  return absl::StrCat(R"({"model":"tiny","messages":[{"role":"user","content":"Hi"}])",
                      std::string(more_fields), "}");
}

std::string ApiTest::Completion(std::string_view more_fields) {
  return absl::StrCat(R"({"model":"tiny","prompt":"Hi")", std::string(more_fields), "}");
}

}  // namespace tandem::gateway
