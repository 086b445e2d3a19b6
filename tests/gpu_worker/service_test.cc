// The service over gRPC, with real expert workers behind real shared-memory links (in this process;
// tests/integration kills real ones): load, steps, and a worker that is lost and comes back.

#include "gpu_worker/service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/base/worker_protocol.h"
#include "common/hw/cpu_features.h"
#include "common/hw/pages.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/expert_worker.h"
#include "expert_worker/kernels/select.h"
#include "expert_worker/service.h"
#include "tests/gpu_worker/step_test_util.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gpu {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience{60};

const kernels::KernelTable* Table() {
  return kernels::SelectKernelTable(Isa::kAmx, DetectCpuFeatures());
}

// One expert worker as its process has it, but for the process.
class ExpertHost {
 public:
  // No descriptor: it computes from the packed file.
  ExpertHost(const std::string& dir, int index, int weights_fd) {
    address_ = "unix:" + dir + "/expert" + std::to_string(index) + ".sock";
    expert::ExpertWorker::Options options;
    options.link_socket = dir + "/expert" + std::to_string(index) + ".link";
    options.weights_fd = weights_fd;
    options.map_weights = weights_fd < 0;
    options.state_dir = weights_fd < 0 ? dir : "";
    options.kernels = Table();
    options.threads = 2;
    worker_ = std::make_unique<expert::ExpertWorker>(options);
    service_ = std::make_unique<expert::ExpertWorkerService>(worker_.get());
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
  }
  ~ExpertHost() {
    worker_->Stop();
    server_->Shutdown(std::chrono::system_clock::now());
  }
  const std::string& address() const { return address_; }
  bool reattached() const { return worker_->info().reattached; }

 private:
  std::string address_;
  std::unique_ptr<expert::ExpertWorker> worker_;
  std::unique_ptr<expert::ExpertWorkerService> service_;
  std::unique_ptr<grpc::Server> server_;
};

class GpuServiceTest : public ::testing::Test {
 protected:
  using Stream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

  void SetUp() override {
    const auto model = tandem::testing::SharedPath("golden/models/qwen3_moe");
    if (!model) GTEST_SKIP() << "no golden/models/qwen3_moe";
    model_dir_ = model->string();
    for (int i = 0; i < 2; ++i) {
      auto memfd = CreateMemfd("test-weights", 0, HugePages::kOff);
      ASSERT_TRUE(memfd.ok()) << memfd.status();
      weights_.emplace_back(memfd->fd);
      StartExpert(i);
    }
    options_.kernels = Table();
    options_.threads = 2;
    options_.parity = true;
    for (const auto& host : experts_) options_.expert_addresses.push_back(host->address());
    options_.expert_shares = {2, 1};
    options_.max_step_rows = 64;
    options_.max_sequences = 4;
    options_.max_context = 128;
    options_.epoch = 9;
    StartGpuWorker();
  }
  void StartGpuWorker() {
    engine_ = std::make_unique<GpuEngine>(options_);
    service_ = std::make_unique<GpuWorkerService>(engine_.get());
    grpc::ServerBuilder builder;
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    stub_ = v1::GpuWorkerService::NewStub(server_->InProcessChannel({}));
  }
  void StopGpuWorker() {
    engine_->Stop();
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    service_.reset();
    engine_.reset();
  }
  void TearDown() override {
    if (engine_ != nullptr) StopGpuWorker();
  }
  void StartExpert(int index) {
    const auto i = static_cast<size_t>(index);
    if (experts_.size() <= i) experts_.resize(i + 1);
    experts_[i] = std::make_unique<ExpertHost>(run_dir_.path().string(), index, weights_[i].get());
  }
  grpc::Status Load(const std::string& dir, uint32_t version, v1::LoadModelResponse& last) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::LoadModelRequest request;
    request.set_protocol_version(version);
    request.set_model_dir(dir);
    const auto reader = stub_->Load(&context, request);
    v1::LoadModelResponse response;
    while (reader->Read(&response)) last = response;
    return reader->Finish();
  }
  void LoadModel() {
    v1::LoadModelResponse last;
    const grpc::Status status = Load(model_dir_, kWorkerProtocolVersion, last);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_TRUE(last.has_info());
  }
  v1::GetGpuWorkerInfoResponse Info() {
    grpc::ClientContext context;
    v1::GetGpuWorkerInfoResponse info;
    EXPECT_TRUE(stub_->GetInfo(&context, {}, &info).ok());
    return info;
  }
  static v1::StepResult Exchange(Stream& stream, v1::Step step) {
    step.set_epoch(9);
    v1::StepRequest request;
    *request.mutable_step() = std::move(step);
    EXPECT_TRUE(stream.Write(request));
    v1::StepResponse response;
    while (stream.Read(&response)) {
      if (response.has_result()) return response.result();
    }
    ADD_FAILURE() << "the stream ended";
    return {};
  }
  static v1::Step Prompt(uint64_t id, const std::vector<uint32_t>& tokens) {
    v1::Step step;
    AddStart(step, id);
    AddTokens(step, id, 0, tokens, {0, 1, 2, 3}, true);
    return step;
  }

  tandem::testing::TempDir run_dir_;
  WorkerOptions options_;
  std::string model_dir_;
  std::vector<shm::UniqueFd> weights_;
  std::vector<std::unique_ptr<ExpertHost>> experts_;
  std::unique_ptr<GpuEngine> engine_;
  std::unique_ptr<GpuWorkerService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::GpuWorkerService::Stub> stub_;
};

TEST_F(GpuServiceTest, RefusesOtherProtocolVersionsAndMissingModels) {
  v1::LoadModelResponse last;
  const grpc::Status version = Load(model_dir_, kWorkerProtocolVersion + 1, last);
  EXPECT_EQ(version.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  const grpc::Status missing = Load("/nowhere", kWorkerProtocolVersion, last);
  EXPECT_THAT(missing.error_message(), HasSubstr("/nowhere"));
  EXPECT_FALSE(Info().ready());
}

TEST_F(GpuServiceTest, GreedyTokensThroughExpertWorkersAreTheReferences) {
  ASSERT_NO_FATAL_FAILURE(LoadModel());
  EXPECT_TRUE(Info().ready());
  auto golden = GoldenModel::Load(model_dir_, {});
  ASSERT_TRUE(golden.ok());
  const std::vector<uint32_t> expected = (*golden)->Ids("seq0.greedy.ids");
  const std::vector<uint32_t> prompt = (*golden)->Ids("seq0.ids");
  grpc::ClientContext context;
  const auto stream = stub_->Step(&context);
  v1::Step step = Prompt(1, prompt);
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < expected.size(); ++i) {
    const v1::StepResult result = Exchange(*stream, step);
    ASSERT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
    tokens.push_back(result.sequences(0).token_ids(0));
    step.Clear();
    AddDecode(step, 1, static_cast<uint32_t>(prompt.size() + i));
  }
  EXPECT_EQ(tokens, expected);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(GpuServiceTest, HotExpertsOfAWorkerThatHandsOverNoWeightsAreRefused) {
  StopGpuWorker();
  experts_[1].reset();
  weights_[1].Reset();
  StartExpert(1);
  options_.hot_experts_bytes = uint64_t{1} << 20;
  StartGpuWorker();
  v1::LoadModelResponse last;
  const grpc::Status status = Load(model_dir_, kWorkerProtocolVersion, last);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr(experts_[1]->address()));
  EXPECT_THAT(status.error_message(), HasSubstr("--weights=copy"));
}

TEST_F(GpuServiceTest, LostExpertWorkerFailsStepsUntilItIsBackWithoutLoadingAgain) {
  ASSERT_NO_FATAL_FAILURE(LoadModel());
  grpc::ClientContext context;
  const auto stream = stub_->Step(&context);
  const v1::StepResult before = Exchange(*stream, Prompt(1, {2, 3, 4}));
  ASSERT_EQ(before.outcome(), v1::STEP_OUTCOME_OK) << before.error();
  experts_[1].reset();
  v1::Step decode;
  AddDecode(decode, 1, 3);
  const v1::StepResult lost = Exchange(*stream, decode);
  EXPECT_EQ(lost.outcome(), v1::STEP_OUTCOME_UNAVAILABLE);
  EXPECT_FALSE(Info().ready());
  // A gateway that connects now is not told that it can serve.
  {
    grpc::ClientContext other;
    other.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::LoadModelRequest request;
    request.set_protocol_version(kWorkerProtocolVersion);
    request.set_model_dir(model_dir_);
    const auto reader = stub_->Load(&other, request);
    v1::LoadModelResponse response;
    ASSERT_TRUE(reader->Read(&response));
    EXPECT_FALSE(response.has_info());
    EXPECT_EQ(response.phase(), "experts");
    other.TryCancel();
    EXPECT_FALSE(reader->Finish().ok());
  }
  StartExpert(1);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!Info().ready() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_TRUE(Info().ready());
  EXPECT_TRUE(experts_[1]->reattached());
  v1::Step again = Prompt(2, {2, 3, 4});
  again.add_release_sequence_ids(1);
  const v1::StepResult after = Exchange(*stream, again);
  ASSERT_EQ(after.outcome(), v1::STEP_OUTCOME_OK) << after.error();
  EXPECT_EQ(after.epoch(), before.epoch());
  EXPECT_EQ(after.sequences(0).token_ids(0), before.sequences(0).token_ids(0));
}

TEST_F(GpuServiceTest, NewStreamForgetsTheSequencesOfTheOldOne) {
  ASSERT_NO_FATAL_FAILURE(LoadModel());
  grpc::ClientContext first_context;
  const auto first = stub_->Step(&first_context);
  EXPECT_EQ(Exchange(*first, Prompt(1, {2})).outcome(), v1::STEP_OUTCOME_OK);
  grpc::ClientContext second_context;
  const auto second = stub_->Step(&second_context);
  v1::Step decode;
  AddDecode(decode, 1, 1);
  EXPECT_EQ(Exchange(*second, decode).outcome(), v1::STEP_OUTCOME_INVALID);
  v1::StepResponse response;
  EXPECT_FALSE(first->Read(&response));
  EXPECT_FALSE(first->Finish().ok());
}

TEST_F(GpuServiceTest, StepsNeedAModel) {
  grpc::ClientContext context;
  const auto stream = stub_->Step(&context);
  v1::StepResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

}  // namespace
}  // namespace tandem::gpu
