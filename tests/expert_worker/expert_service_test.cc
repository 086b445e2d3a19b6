// The expert worker behind its RPC, in one process: order of calls, errors, metrics.

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "common/base/worker_protocol.h"
#include "expert_worker/kernels/tables.h"
#include "expert_worker/service.h"
#include "expert_worker/worker_metrics.h"
#include "tests/fakes/fake_numa_policy.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::expert {
namespace {

namespace v1 = worker::v1;

class ExpertServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto path = tandem::testing::SharedPath("models/tandem-tiny");
    if (!path) GTEST_SKIP() << "no models/tandem-tiny";
    model_ = path->string();
    ExpertWorker::Options options;
    options.link_socket = dir_.path().string() + "/expert.link";
    options.kernels = &kernels::kRefTable;
    options.threads = 2;
    options.numa_node = 1;
    options.numa_policy = &policy_;
    worker_ = std::make_unique<ExpertWorker>(options);
    service_ = std::make_unique<ExpertWorkerService>(worker_.get());
    grpc::ServerBuilder builder;
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    stub_ = v1::ExpertWorkerService::NewStub(server_->InProcessChannel({}));
  }
  void TearDown() override {
    if (worker_ == nullptr) return;
    worker_->Stop();
    server_->Shutdown();
  }

  v1::LoadExpertsRequest LoadRequest(uint32_t index = 0, std::vector<uint32_t> shares = {1, 1}) {
    v1::LoadExpertsRequest request;
    request.set_protocol_version(kWorkerProtocolVersion);
    request.set_model_dir(model_);
    request.set_worker_index(index);
    for (uint32_t share : shares) request.add_shares(share);
    return request;
  }
  // The last message of the stream.
  grpc::Status Load(const v1::LoadExpertsRequest& request, v1::LoadExpertsResponse* last) {
    grpc::ClientContext context;
    auto reader = stub_->Load(&context, request);
    while (reader->Read(last)) EXPECT_LE(last->loaded_bytes(), last->total_bytes());
    return reader->Finish();
  }
  v1::AttachRequest AttachTiny() {
    v1::AttachRequest request;
    request.set_protocol_version(kWorkerProtocolVersion);
    request.set_max_rows(8);
    request.set_hidden(256);
    request.set_top_k(4);
    request.set_lanes(1);
    request.set_row_type(v1::ROW_TYPE_F32);
    return request;
  }
  grpc::Status Attach(const v1::AttachRequest& request, v1::AttachResponse* response) {
    grpc::ClientContext context;
    return stub_->Attach(&context, request, response);
  }
  v1::GetExpertWorkerInfoResponse Info() {
    grpc::ClientContext context;
    v1::GetExpertWorkerInfoResponse response;
    EXPECT_TRUE(stub_->GetInfo(&context, {}, &response).ok());
    return response;
  }

  double Metric(const std::string& name) {
    for (const auto& family : WorkerRegistry(worker_.get()).Collect()) {
      if (family.name == name) return family.metric.at(0).gauge.value;
    }
    ADD_FAILURE() << "no " << name;
    return -1;
  }

  tandem::testing::TempDir dir_;
  std::string model_;
  tandem::testing::FakeNumaPolicy policy_;
  std::unique_ptr<ExpertWorker> worker_;
  std::unique_ptr<ExpertWorkerService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::ExpertWorkerService::Stub> stub_;
};

TEST_F(ExpertServiceTest, LoadsItsShareOnceAndRefusesAnother) {
  EXPECT_FALSE(Info().ready());
  v1::LoadExpertsResponse last;
  ASSERT_TRUE(Load(LoadRequest(), &last).ok());
  EXPECT_TRUE(last.done());
  EXPECT_FALSE(last.reattached());
  // Half of 6 layers x 32 experts x 3 matrices of 64 x 256 BF16.
  EXPECT_EQ(last.total_bytes(), 6u * 32 * 3 * 64 * 256 * 2 / 2);
  EXPECT_EQ(last.loaded_bytes(), last.total_bytes());
  const auto info = Info();
  EXPECT_TRUE(info.ready());
  EXPECT_EQ(info.weights_bytes(), last.total_bytes());
  EXPECT_EQ(info.isa(), "ref");
  EXPECT_TRUE(Load(LoadRequest(), &last).ok());
  EXPECT_EQ(Load(LoadRequest(1), &last).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(ExpertServiceTest, AsksForItsNodeAndTellsHowManyPagesAreElsewhere) {
  v1::LoadExpertsResponse last;
  ASSERT_TRUE(Load(LoadRequest(), &last).ok());
  EXPECT_EQ(policy_.preferred_node, 1);
  EXPECT_GE(policy_.preferred_bytes, last.total_bytes());
  const PlacementSample sample = worker_->info().weights_placement;
  EXPECT_EQ(sample.pages, 1024u);
  EXPECT_EQ(sample.misplaced, 512u);
  EXPECT_EQ(Metric("tandem_expert_worker_weights_sampled_pages"), 1024);
  EXPECT_EQ(Metric("tandem_expert_worker_weights_misplaced_pages"), 512);
}

TEST_F(ExpertServiceTest, LoadsWithoutPermissionToPlacePages) {
  policy_.error = EPERM;
  v1::LoadExpertsResponse last;
  ASSERT_TRUE(Load(LoadRequest(), &last).ok());
  EXPECT_TRUE(Info().ready());
  EXPECT_EQ(worker_->info().weights_placement.pages, 0u);
}

TEST_F(ExpertServiceTest, FailedLoadNamesTheReasonAndMayBeTriedAgain) {
  v1::LoadExpertsRequest request = LoadRequest();
  request.set_model_dir(dir_.path().string() + "/nothing");
  v1::LoadExpertsResponse last;
  const grpc::Status status = Load(request, &last);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.error_message().find("nothing"), std::string::npos) << status.error_message();
  EXPECT_TRUE(Load(LoadRequest(), &last).ok());
}

TEST_F(ExpertServiceTest, BadRequestsAreRefused) {
  v1::LoadExpertsResponse last;
  EXPECT_EQ(Load(LoadRequest(2), &last).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Load(LoadRequest(0, {0, 0}), &last).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::LoadExpertsRequest version = LoadRequest();
  version.set_protocol_version(kWorkerProtocolVersion + 1);
  EXPECT_EQ(Load(version, &last).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  v1::AttachResponse attached;
  EXPECT_EQ(Attach(AttachTiny(), &attached).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  ASSERT_TRUE(Load(LoadRequest(), &last).ok());
  v1::AttachRequest attach = AttachTiny();
  attach.set_hidden(257);
  EXPECT_EQ(Attach(attach, &attached).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  attach = AttachTiny();
  attach.set_row_type(v1::ROW_TYPE_UNSPECIFIED);
  EXPECT_EQ(Attach(attach, &attached).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  attach = AttachTiny();
  attach.set_max_rows(0xFFFFFFFF);
  EXPECT_FALSE(Attach(attach, &attached).ok());
}

TEST_F(ExpertServiceTest, WorkerThatOwnsNothingIsReady) {
  v1::LoadExpertsResponse last;
  ASSERT_TRUE(Load(LoadRequest(1, {1, 0}), &last).ok());
  EXPECT_EQ(last.total_bytes(), 0u);
  v1::AttachResponse attached;
  EXPECT_TRUE(Attach(AttachTiny(), &attached).ok());
}

TEST_F(ExpertServiceTest, AttachGivesATicketUntilDrained) {
  v1::LoadExpertsResponse last;
  ASSERT_TRUE(Load(LoadRequest(), &last).ok());
  v1::AttachResponse first, second;
  ASSERT_TRUE(Attach(AttachTiny(), &first).ok());
  ASSERT_TRUE(Attach(AttachTiny(), &second).ok());
  EXPECT_GT(second.epoch(), first.epoch());
  EXPECT_EQ(second.nonce().size(), 16u);
  EXPECT_EQ(second.link_socket(), dir_.path().string() + "/expert.link");
  EXPECT_NE(second.model_hash(), 0u);
  grpc::ClientContext context;
  v1::DrainResponse drained;
  ASSERT_TRUE(stub_->Drain(&context, {}, &drained).ok());
  EXPECT_EQ(Attach(AttachTiny(), &second).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(Info().ready());
}

TEST_F(ExpertServiceTest, MetricsShowLoadAndLink) {
  EXPECT_EQ(Metric("tandem_expert_worker_ready_workers"), 0);
  v1::LoadExpertsResponse last;
  ASSERT_TRUE(Load(LoadRequest(), &last).ok());
  EXPECT_EQ(Metric("tandem_expert_worker_ready_workers"), 1);
  EXPECT_EQ(Metric("tandem_expert_worker_weights_bytes"), static_cast<double>(last.total_bytes()));
}

}  // namespace
}  // namespace tandem::expert
