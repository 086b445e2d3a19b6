#pragma once

// The gRPC server of a worker process: its services, the standard health service (which says "not
// serving" until SetServing) and reflection. Thread-safe. The services must outlive the server.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

class RpcServer {
 public:
  struct Options {
    std::string address;        // unix:PATH or HOST:PORT
    std::string service_name;   // whose health is told, e.g. tandem.worker.v1.GpuWorkerService
    int max_message_bytes = 0;  // of a request; 0: gRPC's 4 MB
    // Pings a silent client and drops it, with its calls, when no answer comes within the same
    // time; 0: gRPC's two hours.
    std::chrono::milliseconds keepalive{0};
  };

  // Errors: UNAVAILABLE naming --listen and the address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const Options& options,
                                                          std::vector<grpc::Service*> services);
  ~RpcServer();

  // What the health service says of the service from now on.
  void SetServing(bool serving);
  // The port that was bound; 1 for a Unix socket.
  int port() const { return port_; }

  // Takes no new calls; calls still running after `grace` are cancelled.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  RpcServer(std::string service_name, std::unique_ptr<grpc::Server> server, int port);

  const std::string service_name_;
  const std::unique_ptr<grpc::Server> server_;
  const int port_;
};

}  // namespace tandem
