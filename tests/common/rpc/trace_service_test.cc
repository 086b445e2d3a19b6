#include "common/rpc/trace_service.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "common/rpc/rpc_server.h"

namespace tandem {
namespace {

namespace v1 = trace::v1;

constexpr TraceKind kStep = {.name = "step", .role = TraceRole::kStep, .args = {"step", "rows"}};
constexpr TraceKind kWait = {.name = "wait", .role = TraceRole::kCollect};

class TraceServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "the distribution's gRPC is not instrumented: false races";
#endif
    auto server = RpcServer::Start({.address = "127.0.0.1:0", .service_name = "test"}, {&service_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::TraceService::NewStub(grpc::CreateChannel(
        "127.0.0.1:" + std::to_string(server_->port()), grpc::InsecureChannelCredentials()));
  }

  grpc::Status Trace(uint32_t duration_ms) {
    grpc::ClientContext context;
    v1::TraceRequest request;
    request.set_duration_ms(duration_ms);
    const auto reader = stub_->Trace(&context, request);
    v1::TraceResponse response;
    while (reader->Read(&response)) {
      if (response.has_start()) OnStart(response.start());
      if (response.has_tables()) tables_ = response.tables();
      if (response.has_events()) chunks_.push_back(response.events());
    }
    return reader->Finish();
  }

  // Recording is on: what a thread does now must come back.
  void OnStart(const v1::TraceStart& start) {
    start_ = start;
    const int64_t now = TraceNowNs();
    track_->Add(kWait, now, now + 5);
    track_->Add(kStep, now, now + 10, {3, 16});
  }

  Tracer tracer_;
  TraceTrack* const idle_ = tracer_.AddTrack("idle");
  TraceTrack* const track_ = tracer_.AddTrack("executor");
  TraceService service_{"gpu_worker", &tracer_};
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<v1::TraceService::Stub> stub_;
  v1::TraceStart start_;
  v1::TraceTables tables_;
  std::vector<v1::TraceEvents> chunks_;
};

TEST_F(TraceServiceTest, SendsWhatWasRecordedWithItsNames) {
  const grpc::Status status = Trace(100);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(start_.service(), "gpu_worker");
  EXPECT_EQ(start_.pid(), static_cast<uint32_t>(getpid()));
  EXPECT_EQ(start_.boot_id(), BootId());
  EXPECT_GE(start_.now_ns(), tables_.begin_ns());
  EXPECT_GE(tables_.end_ns() - tables_.begin_ns(), 100'000'000);
  ASSERT_EQ(tables_.tracks_size(), 2);
  EXPECT_EQ(tables_.tracks(1).name(), "executor");
  ASSERT_EQ(chunks_.size(), 1u);
  EXPECT_EQ(chunks_[0].track(), 1u);
  ASSERT_EQ(chunks_[0].events_size(), 2);
  const v1::TraceEvent& wait = chunks_[0].events(0);
  EXPECT_EQ(tables_.kinds(static_cast<int>(wait.kind())).role(), v1::EVENT_ROLE_COLLECT);
  EXPECT_EQ(wait.arguments_size(), 0);
  const v1::TraceEvent& step = chunks_[0].events(1);
  EXPECT_EQ(step.duration_ns(), 10u);
  ASSERT_EQ(step.arguments_size(), 2);
  EXPECT_EQ(step.arguments(0), 3);
  EXPECT_EQ(step.arguments(1), 16);
  const v1::EventKind& kind = tables_.kinds(static_cast<int>(step.kind()));
  EXPECT_EQ(kind.name(), "step");
  EXPECT_EQ(kind.role(), v1::EVENT_ROLE_STEP);
  ASSERT_EQ(kind.argument_names_size(), 2);
  EXPECT_EQ(kind.argument_names(1), "rows");
  EXPECT_FALSE(track_->on());
}

TEST_F(TraceServiceTest, RefusesDurationsOutOfRange) {
  for (const uint32_t duration_ms : {0u, kMaxTraceMs + 1}) {
    const grpc::Status status = Trace(duration_ms);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find(std::to_string(duration_ms)), std::string::npos);
  }
}

TEST_F(TraceServiceTest, RefusesASecondTraceAndServesANextOne) {
  ASSERT_TRUE(tracer_.Start().ok());
  EXPECT_EQ(Trace(1).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(track_->on()) << "the refused call must not end the other recording";
  tracer_.Stop();
  EXPECT_TRUE(Trace(1).ok());
}

TEST_F(TraceServiceTest, LeavingEndsTheRecording) {
  grpc::ClientContext context;
  v1::TraceRequest request;
  request.set_duration_ms(kMaxTraceMs);
  const auto reader = stub_->Trace(&context, request);
  v1::TraceResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_TRUE(track_->on());
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  while (track_->on()) std::this_thread::yield();
  EXPECT_TRUE(Trace(1).ok());
}

}  // namespace
}  // namespace tandem
