#include "gateway/api/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include <boost/asio/post.hpp>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/api/grpc_convert.h"
#include "gateway/api/grpc_generate.h"
#include "tandem/serving/v1/inference.grpc.pb.h"

namespace tandem::gateway {
namespace {

namespace v1 = serving::v1;

class InferenceServiceImpl final : public v1::InferenceService::CallbackService {
 public:
  explicit InferenceServiceImpl(GrpcParts parts) : parts_(parts) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    return GenerateCall::Start(parts_, context, request);
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override {
    return Unary(context, "Tokenize", [this, request, response]() -> absl::Status {
      ASSIGN_OR_RETURN(const ServedModel model, parts_.builder->Model({}));
      ASSIGN_OR_RETURN(const Prompt prompt, PromptOf(*request));
      ASSIGN_OR_RETURN(const std::vector<uint32_t> ids, parts_.builder->Tokenize(prompt, "input"));
      response->mutable_ids()->Add(ids.begin(), ids.end());
      response->set_max_context_tokens(model.max_context_tokens);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override {
    return Unary(context, "Detokenize", [this, request, response]() -> absl::Status {
      const std::vector<uint32_t> ids(request->ids().begin(), request->ids().end());
      ASSIGN_OR_RETURN(*response->mutable_text(),
                       parts_.builder->Detokenize(ids, request->skip_special_tokens()));
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest*,
                                     v1::GetModelResponse* response) override {
    return Unary(context, "GetModel", [this, response]() -> absl::Status {
      ASSIGN_OR_RETURN(const ServedModel model, parts_.builder->Model({}));
      response->set_name(model.name);
      response->set_model_type(model.model_type);
      response->set_vocab_size(model.vocab_size);
      response->set_max_context_tokens(model.max_context_tokens);
      response->set_parity(model.parity);
      response->set_has_tokenizer(parts_.builder->tokenizer() != nullptr);
      response->set_has_chat_template(parts_.builder->chat_template() != nullptr);
      response->mutable_end_token_ids()->Add(model.end_ids.begin(), model.end_ids.end());
      response->set_version(TANDEM_VERSION);
      return absl::OkStatus();
    });
  }

 private:
  // Runs `work` on the pool and finishes the call with its status.
  grpc::ServerUnaryReactor* Unary(grpc::CallbackServerContext* context, const char* method,
                                  std::function<absl::Status()> work) {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    const auto start = std::chrono::steady_clock::now();
    boost::asio::post(
        *parts_.pool, [this, context, method, start, reactor, work = std::move(work)] {
          absl::Status status = GrpcTenant(parts_, *context).status();
          if (status.ok()) status = work();
          const grpc::Status final_status = ToGrpcStatus(status);
          const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
          parts_.metrics->Count("grpc", method, GrpcCodeName(final_status), elapsed.count());
          reactor->Finish(final_status);
        });
    return reactor;
  }

  const GrpcParts parts_;
};

}  // namespace

absl::StatusOr<std::string> GrpcTenant(const GrpcParts& parts,
                                       const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto entry = metadata.find("authorization");
  if (entry == metadata.end()) return parts.keys->Tenant({});
  return parts.keys->Tenant(BearerKey({entry->second.data(), entry->second.size()}));
}

struct GrpcServer::State {
  explicit State(GrpcParts parts) : service(parts) {}

  InferenceServiceImpl service;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(GrpcServerOptions options,
                                                              GrpcParts parts) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  auto state = std::make_unique<State>(parts);
  grpc::ServerBuilder builder;
  const bool ipv6 = options.host.find(':') != std::string::npos;
  const std::string host = ipv6 ? absl::StrCat("[", options.host, "]") : options.host;
  builder.AddListeningPort(absl::StrCat(host, ":", options.port), grpc::InsecureServerCredentials(),
                           &state->port);
  builder.RegisterService(&state->service);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_streams_per_connection);
  // Two servers must not share a port unnoticed.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may ping every 10 s, idle or not: proxies cut silent connections. Clients that vanish
  // without a word are found by the server's own pings.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  state->server = builder.BuildAndStart();
  if (state->server == nullptr || state->port == 0) {
    return absl::UnavailableError(absl::StrCat("gRPC port ", options.port, " of ", options.host,
                                               " cannot be bound: it is in use or not allowed"));
  }
  std::unique_ptr<GrpcServer> server(new GrpcServer(std::move(state)));
  server->SetServing(false);
  return server;
}

GrpcServer::GrpcServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

GrpcServer::~GrpcServer() { Shutdown(std::chrono::milliseconds(0)); }

int GrpcServer::port() const { return state_->port; }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* const health = state_->server->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus(serving);
  health->SetServingStatus(v1::InferenceService::service_full_name(), serving);
}

void GrpcServer::Shutdown(std::chrono::milliseconds grace) {
  state_->server->Shutdown(std::chrono::system_clock::now() + grace);
  state_->server->Wait();
}

}  // namespace tandem::gateway
