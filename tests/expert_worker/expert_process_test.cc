// tandem-expert-worker as a process: load, SIGKILL, restart on the supervisor's memfd, SIGTERM.

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/worker_protocol.h"
#include "common/shm/unique_fd.h"
#include "tandem/worker/v1/expert_worker.grpc.pb.h"
#include "tests/testing/child_process.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::expert {
namespace {

namespace v1 = worker::v1;

// The program under test.
class Process : public tandem::testing::ChildProcess {
 public:
  explicit Process(std::vector<std::string> arguments)
      : ChildProcess(TANDEM_EXPERT_WORKER_PATH, std::move(arguments)) {}
};

class ExpertProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto path = tandem::testing::SharedPath("models/tandem-tiny");
    if (!path) GTEST_SKIP() << "no models/tandem-tiny";
    model_ = path->string();
    weights_ = shm::UniqueFd(memfd_create("weights", MFD_ALLOW_SEALING));  // inherited
  }
  std::vector<std::string> Arguments() const {
    return {"--listen=" + address(), "--link-socket=" + dir_.path().string() + "/e.link",
            "--weights-fd=" + std::to_string(weights_.get()), "--threads=1", "--log-level=error"};
  }
  std::string address() const { return "unix:" + dir_.path().string() + "/e.sock"; }

  grpc::Status Load(v1::LoadExpertsResponse* last) {
    auto stub = v1::ExpertWorkerService::NewStub(
        grpc::CreateChannel(address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    v1::LoadExpertsRequest request;
    request.set_protocol_version(kWorkerProtocolVersion);
    request.set_model_dir(model_);
    request.add_shares(1);
    auto reader = stub->Load(&context, request);
    while (reader->Read(last)) {
    }
    return reader->Finish();
  }

  tandem::testing::TempDir dir_;
  std::string model_;
  shm::UniqueFd weights_;
};

TEST_F(ExpertProcessTest, RestartAfterSigkillAttachesToTheKeptWeights) {
  v1::LoadExpertsResponse last;
  {
    Process worker(Arguments());
    const grpc::Status status = Load(&last);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_FALSE(last.reattached());
    EXPECT_EQ(worker.Signal(SIGKILL), 128 + SIGKILL);
  }
  Process again(Arguments());
  const grpc::Status status = Load(&last);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(last.reattached());
  EXPECT_EQ(again.Signal(SIGTERM), 0);
}

TEST_F(ExpertProcessTest, SigtermBeforeAnyLoadEndsCleanly) {
  Process worker(Arguments());
  auto channel = grpc::CreateChannel(address(), grpc::InsecureChannelCredentials());
  ASSERT_TRUE(
      channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(30)));
  EXPECT_EQ(worker.Signal(SIGTERM), 0);
}

TEST_F(ExpertProcessTest, BadOptionsAndAddressesExitWithAReason) {
  Process option({"--max-isa=sse9"});
  EXPECT_EQ(option.Wait(), 2);
  Process address({"--listen=unix:/nonexistent/dir/e.sock", "--log-level=error"});
  EXPECT_EQ(address.Wait(), 1);
  Process shares({"--shares=1,x", "--log-level=error"});
  EXPECT_EQ(shares.Wait(), 1);
}

}  // namespace
}  // namespace tandem::expert
