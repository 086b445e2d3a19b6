#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <string>

#include "common/base/worker_protocol.h"
#include "common/rpc/rpc_server.h"
#include "common/rpc/rpc_status.h"

namespace tandem {
namespace {

class EmptyService : public grpc::Service {};

constexpr char kName[] = "tandem.test.v1.EmptyService";

// What grpc.health.v1.Health/Check answers for `service`: 1 serving, 2 not serving, -1 an error.
// Request and response are one field each: a string, an enum.
int Health(int port, const std::string& service) {
  grpc::GenericStub stub(
      grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  const std::string wire =
      service.empty() ? "" : "\x0a" + std::string(1, static_cast<char>(service.size())) + service;
  const grpc::Slice slice(wire);
  grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  grpc::Slice answer;
  if (!status.ok() || !response.DumpToSingleSlice(&answer).ok() || answer.size() != 2) return -1;
  return answer.begin()[1];
}

TEST(RpcServer, TellsItsHealth) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the distribution's gRPC is not instrumented: false races";
#endif
  EmptyService service;
  const auto server =
      RpcServer::Start({.address = "127.0.0.1:0", .service_name = kName}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(Health((*server)->port(), kName), 2);
  EXPECT_EQ(Health((*server)->port(), ""), 2);
  (*server)->SetServing(true);
  EXPECT_EQ(Health((*server)->port(), kName), 1);
  EXPECT_EQ(Health((*server)->port(), ""), 1);
  EXPECT_EQ(Health((*server)->port(), "another"), -1);
}

TEST(RpcServer, NamesAnAddressThatIsTaken) {
  EmptyService service;
  const auto first =
      RpcServer::Start({.address = "127.0.0.1:0", .service_name = kName}, {&service});
  ASSERT_TRUE(first.ok());
  const std::string address = "127.0.0.1:" + std::to_string((*first)->port());
  EmptyService other;
  const auto second = RpcServer::Start({.address = address, .service_name = kName}, {&other});
  ASSERT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_NE(second.status().message().find(address), std::string::npos);
}

TEST(RpcStatus, CarriesCodeAndMessageAcross) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::ResourceExhaustedError("full"), absl::UnavailableError("gone")}) {
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
  }
}

TEST(RpcStatus, RefusesAnotherProtocolVersionWithBothNumbers) {
  EXPECT_TRUE(CheckProtocolVersion(kWorkerProtocolVersion, "gpu worker").ok());
  const absl::Status refused = CheckProtocolVersion(kWorkerProtocolVersion + 41, "gpu worker");
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  for (const uint32_t version : {kWorkerProtocolVersion, kWorkerProtocolVersion + 41}) {
    EXPECT_NE(refused.message().find(std::to_string(version)), std::string::npos);
  }
}

}  // namespace
}  // namespace tandem
