// The gRPC front end through a C++ client.

#include "gateway/api/grpc_server.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "tandem/serving/v1/inference.grpc.pb.h"
#include "tests/gateway/api/api_fixture.h"

namespace tandem::gateway {
namespace {

namespace v1 = serving::v1;
using ::testing::HasSubstr;

constexpr std::chrono::milliseconds kSoon{10'000};

class GrpcTest : public ApiTest {
 protected:
  std::unique_ptr<v1::InferenceService::Stub> Stub() {
    return v1::InferenceService::NewStub(grpc::CreateChannel(
        absl::StrCat("127.0.0.1:", grpc_server_->port()), grpc::InsecureChannelCredentials()));
  }

  struct Answer {
    std::string text;
    std::vector<v1::GenerateResponse> responses;
    grpc::Status status;
  };
  Answer Generate(const v1::GenerateRequest& request, const std::string& key = {}) {
    const auto stub = Stub();
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    const auto reader = stub->Generate(&context, request);
    Answer answer;
    for (v1::GenerateResponse response; reader->Read(&response);) {
      answer.text += response.text_delta();
      answer.responses.push_back(response);
    }
    answer.status = reader->Finish();
    return answer;
  }

  static v1::GenerateRequest ChatRequest() {
    v1::GenerateRequest request;
    v1::ChatMessage* const message = request.mutable_chat()->add_messages();
    message->set_role("user");
    message->set_content("Hi");
    return request;
  }
};

TEST_F(GrpcTest, GenerateStreamsDeltasAndEndsWithReasonAndUsage) {
  const Answer answer = Generate(ChatRequest());
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.text, "Hello world");
  const v1::GenerateResponse& last = answer.responses.back();
  EXPECT_EQ(last.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(last.usage().completion_tokens(), 2u);
  EXPECT_EQ(last.usage().prompt_tokens(), engine_.requests()[0].prompt.size());
  EXPECT_FALSE(last.request_id().empty());
  EXPECT_FLOAT_EQ(engine_.requests()[0].sampling.temperature, 0.7f);
}

TEST_F(GrpcTest, BothFrontEndsMakeTheSameEngineRequest) {
  ASSERT_TRUE(Generate(ChatRequest()).status.ok());
  ASSERT_EQ(PostChat(Chat()).status, 200);
  const auto requests = engine_.requests();
  EXPECT_EQ(requests[0].prompt, requests[1].prompt);
  EXPECT_EQ(requests[0].stopping.max_tokens, requests[1].stopping.max_tokens);
}

TEST_F(GrpcTest, ChoicesLogprobsAndTokenIds) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(5);
  request.set_n(2);
  request.set_top_logprobs(1);
  FakeScript script;
  script.top = {{100, -0.5f}};
  engine_.SetScript(script);
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  int finished = 0;
  int tokens = 0;
  for (const v1::GenerateResponse& response : answer.responses) {
    finished += response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED;
    tokens += response.token_ids_size();
    EXPECT_EQ(response.logprobs_size(), response.token_ids_size());
  }
  EXPECT_EQ(finished, 2);
  EXPECT_EQ(tokens, 4);
  EXPECT_EQ(answer.responses.back().usage().completion_tokens(), 4u);
}

TEST_F(GrpcTest, ErrorsAreStatusesWithDetails) {
  v1::GenerateRequest request = ChatRequest();
  request.mutable_sampling()->set_temperature(std::numeric_limits<float>::quiet_NaN());
  const Answer nan = Generate(request);
  EXPECT_EQ(nan.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(nan.status.error_details(), HasSubstr("google.rpc.BadRequest"));
  EXPECT_THAT(nan.status.error_details(), HasSubstr("temperature"));

  request = ChatRequest();
  request.set_model("other");
  EXPECT_EQ(Generate(request).status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Generate({}).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request = ChatRequest();
  request.mutable_stopping()->set_max_tokens(2000);
  EXPECT_THAT(Generate(request).status.error_details(), HasSubstr("context_length_exceeded"));

  engine_.SetScript({.refuse = absl::ResourceExhaustedError("full")});
  EXPECT_EQ(Generate(ChatRequest()).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  engine_.SetScript({.reason = FinishReason::kError, .error = absl::UnavailableError("lost")});
  const Answer lost = Generate(ChatRequest());
  EXPECT_EQ(lost.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(lost.text, "Hello world");
}

TEST_F(GrpcTest, CancellingEndsTheGeneration) {
  engine_.SetScript({.endless = true});
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, ChatRequest());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  context.TryCancel();
  EXPECT_TRUE(engine_.WaitUntilIdle(kSoon));
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(GrpcTest, DeadlineAndDepartureDuringPrefillCancel) {
  engine_.SetScript({.texts = {}, .hold = true});
  const auto stub = Stub();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  const auto reader = stub->Generate(&context, ChatRequest());
  v1::GenerateResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(engine_.WaitUntilIdle(kSoon));
}

TEST_F(GrpcTest, AClientThatDoesNotReadIsCancelled) {
  engine_.SetScript({.texts = {std::string(100'000, 'x')}, .endless = true});
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, ChatRequest());
  ASSERT_TRUE(engine_.WaitForRequests(1, kSoon));
  EXPECT_TRUE(engine_.WaitUntilIdle(kSoon));
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(GrpcTest, TokenizeDetokenizeAndGetModel) {
  const auto stub = Stub();
  v1::TokenizeRequest text;
  text.set_text("Hello there");
  v1::TokenizeResponse ids;
  grpc::ClientContext tokenize;
  ASSERT_TRUE(stub->Tokenize(&tokenize, text, &ids).ok());
  EXPECT_EQ(ids.max_context_tokens(), 1024u);
  v1::DetokenizeRequest back;
  *back.mutable_ids() = ids.ids();
  v1::DetokenizeResponse detokenized;
  grpc::ClientContext detokenize;
  ASSERT_TRUE(stub->Detokenize(&detokenize, back, &detokenized).ok());
  EXPECT_EQ(detokenized.text(), "Hello there");
  v1::GetModelResponse model;
  grpc::ClientContext get_model;
  ASSERT_TRUE(stub->GetModel(&get_model, {}, &model).ok());
  EXPECT_EQ(model.name(), "tiny");
  EXPECT_TRUE(model.has_tokenizer());
  EXPECT_TRUE(model.has_chat_template());
}

TEST_F(GrpcTest, KeysAreRequired) {
  Setup setup;
  setup.keys = {"secret"};
  Start(setup);
  EXPECT_EQ(Generate(ChatRequest()).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Generate(ChatRequest(), "wrong").status.error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(Generate(ChatRequest(), "secret").status.ok());
  grpc::ClientContext context;
  v1::GetModelResponse model;
  EXPECT_EQ(Stub()->GetModel(&context, {}, &model).error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(GrpcTest, APortInUseIsRefusedByNumber) {
  GrpcServerOptions options;
  options.port = grpc_server_->port();
  const auto second =
      GrpcServer::Start(options, {&engine_, builder_.get(), &keys_, &pool_, &metrics_, {}});
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(std::to_string(options.port)));
}

}  // namespace
}  // namespace tandem::gateway
