#include "deploy/cli/launch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "deploy/cli/pack_command.h"

namespace tandem {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

Topology TwoNodes() {
  Topology topology;
  topology.allowed_cpus = {0, 1, 2, 3};
  topology.nodes = {{0, {0, 1}, false}, {1, {2, 3}, false}};
  return topology;
}

LaunchInputs Inputs() {
  LaunchInputs inputs;
  inputs.topology = TwoNodes();
  inputs.program_dir = "/opt/bin";
  inputs.run_dir = "/run/x";
  inputs.weight_fds = {7, 8, 9};
  return inputs;
}

TEST(LaunchPlan, GivesEveryNumaNodeItsWorker) {
  const auto plan = MakeLaunchPlan(Inputs());
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->expert_workers.size(), 2u);
  EXPECT_EQ(plan->expert_workers[1].name, "expert_worker.1");
  EXPECT_THAT(plan->expert_workers[1].argv, Contains("--cpus=2-3"));
  EXPECT_THAT(plan->expert_workers[1].argv, Contains("--shares=1,1"));
  EXPECT_EQ(plan->expert_workers[1].inherited_fds, std::vector<int>{8});
  EXPECT_THAT(plan->gpu_worker.argv,
              Contains("--expert-workers=unix:/run/x/expert0.sock,unix:/run/x/expert1.sock"));
  EXPECT_THAT(plan->gateway.argv, Contains("--control-listen=unix:/run/x/gateway.sock"));
}

TEST(LaunchPlan, ExpertWorkersKeepPackedWeightsInTheStateDirectory) {
  LaunchInputs inputs = Inputs();
  inputs.options.state_dir = "/var/lib/tandem";
  inputs.options.weights = "map";
  const auto plan = MakeLaunchPlan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const ProcessSpec& worker : plan->expert_workers) {
    EXPECT_THAT(worker.argv, Contains("--state-dir=/var/lib/tandem"));
    EXPECT_THAT(worker.argv, Contains("--weights=map"));
  }
  PackOptions pack;
  pack.model = "/models/a";
  pack.state_dir = inputs.options.state_dir;
  const std::vector<std::string> arguments = PackArguments(pack, "/opt/bin");
  EXPECT_EQ(arguments[0], "/opt/bin/tandem-expert-worker");
  EXPECT_THAT(arguments, Contains("--pack-only"));
  EXPECT_THAT(arguments, Contains("--model=/models/a"));
  EXPECT_THAT(arguments, Contains("--state-dir=/var/lib/tandem"));
}

TEST(LaunchPlan, RefusesHotExpertsOfMappedWeights) {
  LaunchInputs inputs = Inputs();
  inputs.options.state_dir = "/var/lib/tandem";
  inputs.options.weights = "map";
  inputs.options.hot_experts_gb = 1;
  const absl::Status status = MakeLaunchPlan(inputs).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("--weights=copy"));
  // Experts in process are never mapped.
  inputs.options.link = "inprocess";
  EXPECT_TRUE(MakeLaunchPlan(inputs).ok());
}

TEST(LaunchPlan, MoreWorkersThanNodesShareCpus) {
  LaunchInputs inputs = Inputs();
  inputs.options.expert_workers = 3;
  inputs.options.expert_shares = "3,1,0";
  const auto plan = MakeLaunchPlan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->expert_workers[2].argv, Contains("--cpus=0-1"));
  EXPECT_THAT(plan->expert_workers[2].argv, Contains("--shares=3,1,0"));
}

TEST(LaunchPlan, ARestartedGatewayKeepsThePortsThatWerePicked) {
  LaunchInputs inputs = Inputs();
  inputs.options.http_port = 0;
  inputs.options.grpc_port = 50'051;
  inputs.options.metrics_port = 0;
  const auto plan = MakeLaunchPlan(inputs);
  ASSERT_TRUE(plan.ok());
  const ProcessSpec again =
      WithPorts(plan->gateway, {.http = 40'001, .grpc = 7, .metrics = 40'003});
  EXPECT_EQ(again.argv.size(), plan->gateway.argv.size());
  EXPECT_THAT(again.argv, Contains("--http-port=40001"));
  EXPECT_THAT(again.argv, Contains("--grpc-port=50051"));
  EXPECT_THAT(again.argv, Contains("--metrics-port=40003"));
}

TEST(LaunchPlan, InProcessLinkNeedsNoExpertWorkers) {
  LaunchInputs inputs = Inputs();
  inputs.options.link = "inprocess";
  const auto plan = MakeLaunchPlan(inputs);
  ASSERT_TRUE(plan.ok());
  EXPECT_TRUE(plan->expert_workers.empty());
}

TEST(LaunchPlan, RefusesSharesThatDoNotFitTheWorkers) {
  LaunchInputs inputs = Inputs();
  for (const char* bad : {"1", "1,2,3", "a,b", "0,0", "-1,2"}) {
    inputs.options.expert_shares = bad;
    const auto plan = MakeLaunchPlan(inputs);
    ASSERT_FALSE(plan.ok()) << bad;
    EXPECT_THAT(std::string(plan.status().message()), HasSubstr("--expert-shares"));
  }
}

TEST(LaunchPlan, DeferralNeedsALimitAndReachesTheWorker) {
  LaunchInputs inputs = Inputs();
  inputs.options.pipeline = "both";
  EXPECT_THAT(MakeLaunchPlan(inputs).status().message(), HasSubstr("--max-deferred"));
  inputs.options.max_deferred = 2;
  inputs.options.max_deferred_mass = 0.15;
  const auto plan = MakeLaunchPlan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->gpu_worker.argv, Contains("--pipeline=both"));
  EXPECT_THAT(plan->gpu_worker.argv, Contains("--max-deferred=2"));
  EXPECT_THAT(plan->gpu_worker.argv, Contains("--max-deferred-mass=0.15"));
}

TEST(LaunchPlan, ThreadsLimitTheCpusOfEveryProcess) {
  LaunchInputs inputs = Inputs();
  inputs.options.threads = 1;
  const auto plan = MakeLaunchPlan(inputs);
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan->gpu_worker.argv, Contains("--cpus=0"));
  EXPECT_THAT(plan->expert_workers[1].argv, Contains("--cpus=2"));
}

}  // namespace
}  // namespace tandem
