#pragma once

// The gRPC front end: tandem.serving.v1.InferenceService, grpc.health.v1 and reflection on one
// port. Health and reflection need no API key; everything else takes it from `authorization: Bearer
// KEY`.
//
// Health is NOT_SERVING until SetServing(true): "" and the service's full name follow it.
// Thread safety: as documented by method; parts are borrowed and must outlive the server.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "gateway/api/api_error.h"
#include "gateway/api/api_keys.h"
#include "gateway/api/api_metrics.h"
#include "gateway/api/blocking_pool.h"
#include "gateway/api/generation_stream.h"
#include "gateway/api/request_builder.h"
#include "gateway/api/request_id.h"

namespace tandem::gateway {

struct GrpcParts {
  Engine* engine = nullptr;
  const RequestBuilder* builder = nullptr;
  const ApiKeys* keys = nullptr;
  BlockingPool* pool = nullptr;
  ApiMetrics* metrics = nullptr;
  GenerationStreamOptions stream;
};

struct GrpcServerOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0 picks a free one
  int max_message_bytes = 64 << 20;
  int max_streams_per_connection = 256;
};

// The tenant of a call's key, or UNAUTHENTICATED.
absl::StatusOr<std::string> GrpcTenant(const GrpcParts& parts,
                                       const grpc::CallbackServerContext& context);

class GrpcServer {
 public:
  // Errors: UNAVAILABLE naming the port that cannot be bound.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(GrpcServerOptions options,
                                                           GrpcParts parts);
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  int port() const;
  // What health checks and watches report, from any thread.
  void SetServing(bool serving);
  // No new calls; open ones are cancelled after `grace`. Returns when none is left.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  struct State;
  explicit GrpcServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tandem::gateway
