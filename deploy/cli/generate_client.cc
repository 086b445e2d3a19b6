#include "deploy/cli/generate_client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "common/rpc/rpc_status.h"
#include "tandem/serving/v1/inference.grpc.pb.h"

namespace tandem {

namespace pb = serving::v1;

struct GenerateClient::Impl {
  std::unique_ptr<pb::InferenceService::Stub> stub;
  std::string api_key;

  void Prepare(grpc::ClientContext& context) const {
    if (!api_key.empty()) context.AddMetadata("authorization", "Bearer " + api_key);
  }
};

GenerateClient::GenerateClient(const std::string& address, std::string api_key)
    : impl_(std::make_unique<Impl>()) {
  impl_->stub = pb::InferenceService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  impl_->api_key = std::move(api_key);
}

GenerateClient::~GenerateClient() = default;

absl::Status GenerateClient::Ready(int timeout_ms) {
  grpc::ClientContext context;
  impl_->Prepare(context);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  pb::GetModelResponse response;
  return FromGrpc(impl_->stub->GetModel(&context, {}, &response));
}

absl::StatusOr<std::string> GenerateClient::Chat(
    const std::vector<ChatTurn>& turns, const GenerateSettings& settings,
    const std::function<void(std::string_view)>& on_text) {
  pb::GenerateRequest request;
  for (const ChatTurn& turn : turns) {
    pb::ChatMessage* message = request.mutable_chat()->add_messages();
    message->set_role(turn.role);
    message->set_content(turn.content);
  }
  if (settings.max_tokens > 0) request.mutable_stopping()->set_max_tokens(settings.max_tokens);
  if (settings.temperature >= 0) {
    request.mutable_sampling()->set_temperature(static_cast<float>(settings.temperature));
  }
  grpc::ClientContext context;
  impl_->Prepare(context);
  // Bounds a server that stops answering; an answer itself may take long on a big model.
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  auto reader = impl_->stub->Generate(&context, request);
  std::string whole;
  pb::GenerateResponse response;
  while (reader->Read(&response)) {
    whole += response.text_delta();
    if (!response.text_delta().empty()) on_text(response.text_delta());
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return FromGrpc(status);
  return whole;
}

}  // namespace tandem
