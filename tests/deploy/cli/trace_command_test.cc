#include "deploy/cli/trace_command.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>

#include "common/rpc/rpc_server.h"
#include "tandem/trace/v1/trace.grpc.pb.h"

namespace tandem {
namespace {

namespace v1 = trace::v1;
using ::testing::HasSubstr;
using Writer = grpc::ServerWriter<v1::TraceResponse>;

// A process that sends what a test tells it to.
class FakeProcess final : public v1::TraceService::Service {
 public:
  using Script = std::function<grpc::Status(grpc::ServerContext*, Writer*)>;

  explicit FakeProcess(Script script) : script_(std::move(script)) {
    auto server = RpcServer::Start({.address = "127.0.0.1:0", .service_name = "test"}, {this});
    if (server.ok()) server_ = *std::move(server);
  }

  std::string address() const { return "127.0.0.1:" + std::to_string(server_->port()); }

  grpc::Status Trace(grpc::ServerContext* context, const v1::TraceRequest*,
                     Writer* writer) override {
    return script_(context, writer);
  }

 private:
  const Script script_;
  std::unique_ptr<RpcServer> server_;
};

class TraceCommandTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "the distribution's gRPC is not instrumented: false races";
#endif
  }
};

void SendStart(Writer* writer, const std::string& boot_id = "") {
  v1::TraceResponse response;
  response.mutable_start()->set_service("expert_worker");
  response.mutable_start()->set_boot_id(boot_id);
  response.mutable_start()->set_now_ns(5);
  writer->Write(response);
}

void SendTables(Writer* writer) {
  v1::TraceResponse response;
  v1::TraceTables& tables = *response.mutable_tables();
  tables.add_tracks()->set_name("experts 0");
  v1::EventKind& kind = *tables.add_kinds();
  kind.set_name("experts");
  kind.add_argument_names("step");
  writer->Write(response);
}

void SendEvent(Writer* writer, uint32_t track, uint32_t kind, int arguments) {
  v1::TraceResponse response;
  response.mutable_events()->set_track(track);
  v1::TraceEvent& event = *response.mutable_events()->add_events();
  event.set_kind(kind);
  for (int i = 0; i < arguments; ++i) event.add_arguments(i);
  writer->Write(response);
}

TEST_F(TraceCommandTest, GathersProcessesAndNumbersThoseOfOneName) {
  const auto script = [](grpc::ServerContext*, Writer* writer) {
    SendStart(writer);
    SendTables(writer);
    SendEvent(writer, 0, 0, 1);
    SendEvent(writer, 0, 0, 1);
    return grpc::Status::OK;
  };
  const FakeProcess a(script);
  const FakeProcess b(script);
  int told = 0;
  const auto traces = RecordTimeline({a.address(), b.address()}, 1, [&] { ++told; });
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(told, 1);
  ASSERT_EQ(traces->size(), 2u);
  EXPECT_EQ((*traces)[0].name, "expert_worker.0");
  EXPECT_EQ((*traces)[1].name, "expert_worker.1");
  ASSERT_EQ((*traces)[1].events.size(), 1u);
  EXPECT_EQ((*traces)[1].events[0].size(), 2u);
  // Of an unknown machine: its clock was 5 ns in the middle of the call.
  EXPECT_GT((*traces)[0].shift_ns, 5);
  EXPECT_GT((*traces)[0].clock_error_ns, 0);
}

TEST_F(TraceCommandTest, RefusesWhatWasNotAnnounced) {
  struct Case {
    uint32_t track;
    uint32_t kind;
    int arguments;
  };
  for (const Case& bad : {Case{1, 0, 1}, Case{0, 1, 1}, Case{0, 0, 0}, Case{0, 0, 2}}) {
    const FakeProcess process([&bad](grpc::ServerContext*, Writer* writer) {
      SendStart(writer);
      SendTables(writer);
      SendEvent(writer, bad.track, bad.kind, bad.arguments);
      return grpc::Status::OK;
    });
    const auto traces = RecordTimeline({process.address()}, 1);
    EXPECT_EQ(traces.status().code(), absl::StatusCode::kDataLoss) << traces.status();
    EXPECT_THAT(std::string(traces.status().message()), HasSubstr(process.address()));
  }
}

TEST_F(TraceCommandTest, OneThatRefusesEndsTheOthers) {
  const FakeProcess busy([](grpc::ServerContext*, Writer*) {
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "recorded already");
  });
  const FakeProcess endless([](grpc::ServerContext* context, Writer* writer) {
    SendStart(writer);
    while (!context->IsCancelled()) SendTables(writer);
    return grpc::Status::CANCELLED;
  });
  const auto traces = RecordTimeline({endless.address(), busy.address()}, 1);
  EXPECT_EQ(traces.status().code(), absl::StatusCode::kFailedPrecondition) << traces.status();
  EXPECT_THAT(std::string(traces.status().message()), HasSubstr(busy.address()));
}

}  // namespace
}  // namespace tandem
