#include "common/rpc/rpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const Options& options,
                                                            std::vector<grpc::Service*> services) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options.address, grpc::InsecureServerCredentials(), &port);
  // Two servers must not share a port unnoticed.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  for (grpc::Service* service : services) builder.RegisterService(service);
  if (options.max_message_bytes > 0) builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  if (options.keepalive.count() > 0) {
    const int keepalive_ms = static_cast<int>(options.keepalive.count());
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms);
  }
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat("--listen: cannot listen on ", options.address));
  }
  std::unique_ptr<RpcServer> started(new RpcServer(options.service_name, std::move(server), port));
  started->SetServing(false);
  return started;
}

RpcServer::RpcServer(std::string service_name, std::unique_ptr<grpc::Server> server, int port)
    : service_name_(std::move(service_name)), server_(std::move(server)), port_(port) {}

RpcServer::~RpcServer() { Shutdown(std::chrono::milliseconds(0)); }

void RpcServer::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
  server_->GetHealthCheckService()->SetServingStatus(service_name_, serving);
}

void RpcServer::Shutdown(std::chrono::milliseconds grace) {
  server_->Shutdown(std::chrono::system_clock::now() + grace);
}

}  // namespace tandem
