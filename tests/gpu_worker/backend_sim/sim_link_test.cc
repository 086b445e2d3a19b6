// Submissions to simulated experts: when they are taken up, answered and waited for, by hand; and
// the sums, which are those of the link inside.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/select.h"
#include "gpu_worker/backend_cpu/cpu_backend.h"
#include "gpu_worker/backend_sim/sim_backend.h"
#include "gpu_worker/backend_sim/sim_expert_link.h"
#include "gpu_worker/link_limits.h"
#include "gpu_worker/links/inprocess_expert_link.h"
#include "tests/gpu_worker/links/fake_experts.h"

namespace tandem::gpu {
namespace {

using testing::ExpectedSums;
using testing::FakeExperts;
using testing::LinkInput;

// Round figures: a row's way to the host takes 415 ns and 2 us of latency, a sum's way back 819.
SimMachine RoundMachine() {
  return {.name = "round",
          .gpu_bandwidth_gbps = 1000,
          .gpu_tflops = 100,
          .launch_gap_us = 1,
          .graph_gap_us = 0.5,
          .gpu_memory_gib = 1,
          .to_device_gbps = 10,
          .to_host_gbps = 10,
          .pcie_latency_us = 2,
          .cpu_bandwidth_gbps = 100,
          .cpu_tflops = 10,
          .submission_us = 3};
}
constexpr int64_t kRowNs = 415;  // (2 * 2048 + 7 * 8) bytes
constexpr int64_t kSumNs = 819;  // 4 * 2048 bytes
constexpr int64_t kLatencyNs = 2000;
constexpr int64_t kGapNs = 1000;
constexpr int64_t kOverheadNs = 3000;
constexpr double kExpertNs = 26542.08;  // 2,654,208 bytes at 100 GB/s

class SimLinkTest : public ::testing::Test {
 protected:
  static SimShape Shape() { return *MakeSimShape(*FindSimModel("qwen3-30b-int4")); }
  static CpuBackendOptions TensorOptions() {
    CpuBackendOptions options;
    options.kernels = kernels::SelectKernelTable(Isa::kAmx, DetectCpuFeatures());
    options.max_rows = 4;
    options.max_vocab = 320;
    options.max_experts = 128;
    return options;
  }
  void SetUp() override {
    auto inner = MakeInProcessExpertLink({.limits = limits_}, &experts_);
    ASSERT_TRUE(inner.ok()) << inner.status();
    inner_ = std::move(*inner);
    link_ = std::make_unique<SimExpertLink>(device_, *inner_);
    for (uint32_t lane = 0; lane < 2; ++lane) {
      LinkInput& input = inputs_[lane];
      input.lane = lane;
      input.rows = 1;
      input.x.assign(limits_.hidden, 0.5f + static_cast<float>(lane));
      for (uint16_t i = 0; i < 8; ++i) input.ids.push_back(static_cast<uint16_t>(3 * i + lane));
      input.weights.assign(8, 0.125f);
      sums_[lane].assign(limits_.hidden, 0);
    }
  }
  void Submit(uint32_t lane, int layer) {
    LinkInput& input = inputs_[lane];
    input.layer = static_cast<uint32_t>(layer);
    backend_.ExpertSubmit({.rows = {1, &input.rows},
                           .link = link_.get(),
                           .lane = static_cast<int>(lane),
                           .layer = layer,
                           .x = {input.x.data(), limits_.hidden},
                           .ids = input.ids.data(),
                           .weights = input.weights.data(),
                           .deferred = input.deferred.empty() ? nullptr : input.deferred.data()});
  }
  void Wait(uint32_t lane, int layer) {
    backend_.ExpertWait({.rows = {1, &inputs_[lane].rows},
                         .link = link_.get(),
                         .lane = static_cast<int>(lane),
                         .layer = layer,
                         .out = {sums_[lane].data(), limits_.hidden}});
  }
  int64_t ComputeNs() const { return device_.timeline.TimeNs(SimResource::kCompute); }
  static int64_t Experts(int count) { return std::llround(count * kExpertNs); }

  SimDevice device_{RoundMachine(), Shape(), {}};
  shm::BatchLimits limits_ = LinkLimits(device_.shape.small, 4, shm::RowType::kF32);
  FakeExperts experts_;
  std::unique_ptr<ExpertLink> inner_;
  CpuBackend tensors_{TensorOptions()};
  std::unique_ptr<SimExpertLink> link_;
  SimBackend backend_{device_, tensors_};
  LinkInput inputs_[2];
  std::vector<float> sums_[2];
};

TEST_F(SimLinkTest, SecondLaneIsComputedAfterTheFirst) {
  link_->BeginStep(1);
  Submit(0, 0);
  Submit(1, 0);
  const int64_t submitted_ns = 2 * (kGapNs + kRowNs);
  EXPECT_EQ(ComputeNs(), submitted_ns);
  Wait(0, 0);
  const int64_t cost_ns = kOverheadNs + Experts(8);
  const int64_t first_ns = kGapNs + kRowNs + kLatencyNs + cost_ns;
  EXPECT_EQ(ComputeNs(), first_ns + kLatencyNs + kSumNs);
  Wait(1, 0);
  EXPECT_EQ(ComputeNs(), first_ns + cost_ns + kLatencyNs + kSumNs);
  ASSERT_TRUE(backend_.Synchronize().ok());
  ASSERT_TRUE(link_->EndStep().ok());
  EXPECT_EQ(link_->layer_times(0, 0).begin_ns, kGapNs + kRowNs + kLatencyNs);
  EXPECT_EQ(link_->layer_times(1, 0).begin_ns, first_ns);
  EXPECT_EQ(link_->layer_times(1, 0).end_ns, first_ns + cost_ns);
  EXPECT_EQ(link_->layer_times(0, 1).reply_ns, 0);  // not of this step
  for (uint32_t lane = 0; lane < 2; ++lane) {
    EXPECT_EQ(sums_[lane], ExpectedSums(limits_, 0).Next(inputs_[lane])) << lane;
  }
  const SimLog::Records records = device_.log.Take();
  ASSERT_EQ(records.experts.size(), 2u);
  EXPECT_EQ(records.experts[0].immediate_ns, cost_ns);
  EXPECT_EQ(records.experts[1].stall_ns, 0);
}

TEST_F(SimLinkTest, DeferredPicksAreComputedAfterTheAnswer) {
  inputs_[0].deferred = {0, 0, 0, 0, 0, 1, 1, 1};
  link_->BeginStep(1);
  Submit(0, 0);
  Wait(0, 0);
  const int64_t answer_ns = kGapNs + kRowNs + kLatencyNs + kOverheadNs + Experts(5);
  EXPECT_EQ(ComputeNs(), answer_ns + kLatencyNs + kSumNs);
  EXPECT_EQ(device_.timeline.TimeNs(SimResource::kExperts), answer_ns + Experts(3));
  // The next layer's rows come while the deferred part is still being computed.
  ExpectedSums expected(limits_, 0);
  EXPECT_EQ(sums_[0], expected.Next(inputs_[0]));
  inputs_[0].deferred.assign(8, 0);
  sums_[0].assign(limits_.hidden, 0);
  Submit(0, 1);
  Wait(0, 1);
  const int64_t next_ns = answer_ns + Experts(3) + kOverheadNs + Experts(8);
  EXPECT_EQ(ComputeNs(), next_ns + kLatencyNs + kSumNs);
  EXPECT_EQ(sums_[0], expected.Next(inputs_[0]));
  ASSERT_TRUE(backend_.Synchronize().ok());
  ASSERT_TRUE(link_->EndStep().ok());
  EXPECT_EQ(link_->layer_times(0, 0).reply_ns, answer_ns);
  EXPECT_EQ(link_->layer_times(0, 0).end_ns, answer_ns + Experts(3));
}

// 10 of the 100 GB/s go to a copy that is under way when the rows are taken up.
TEST_F(SimLinkTest, CopiesToTheDeviceTakeTheirPartOfTheBandwidth) {
  const int64_t taken_up_ns = kGapNs + kRowNs + kLatencyNs;
  device_.pcie.CopyEndNs(PcieWay::kToDevice, 10.0 * static_cast<double>(taken_up_ns + 1), 0);
  EXPECT_EQ(device_.pcie.HostReadGbps(taken_up_ns), 10);
  EXPECT_EQ(device_.pcie.HostReadGbps(taken_up_ns + 1), 0);
  link_->BeginStep(1);
  Submit(0, 0);
  Wait(0, 0);
  const int64_t slow_ns = std::llround(8 * kExpertNs * 100 / 90);
  EXPECT_EQ(link_->layer_times(0, 0).reply_ns, taken_up_ns + kOverheadNs + slow_ns);
  // The copy has ended.
  Submit(0, 1);
  Wait(0, 1);
  const LayerTimes after = link_->layer_times(0, 1);
  EXPECT_EQ(after.reply_ns - after.begin_ns, kOverheadNs + Experts(8));
  ASSERT_TRUE(backend_.Synchronize().ok());
  ASSERT_TRUE(link_->EndStep().ok());
}

TEST_F(SimLinkTest, ExpertsThatRowsShareAreReadOnceAndSkippedOnesNotAtAll) {
  LinkInput& input = inputs_[0];
  input.rows = 2;
  input.x.resize(2 * limits_.hidden, 1.0f);
  input.ids.insert(input.ids.end(), input.ids.begin(), input.ids.end());
  input.weights.resize(16, 0.125f);
  input.ids[0] = input.ids[1] = input.ids[8] = kNoExpert;
  link_->BeginStep(1);
  int32_t rows = 2;
  backend_.ExpertSubmit({.rows = {4, &rows},
                         .link = link_.get(),
                         .x = {input.x.data(), limits_.hidden},
                         .ids = input.ids.data(),
                         .weights = input.weights.data()});
  std::vector<float> sums(2 * limits_.hidden);
  backend_.ExpertWait(
      {.rows = {4, &rows}, .link = link_.get(), .out = {sums.data(), limits_.hidden}});
  ASSERT_TRUE(backend_.Synchronize().ok());
  // Row 1 still picks the second expert that row 0 skips: 7 in all.
  EXPECT_EQ(device_.log.Take().experts.at(0).immediate_ns, kOverheadNs + Experts(7));
}

TEST_F(SimLinkTest, RefusedSubmissionFailsTheStep) {
  link_->BeginStep(1);
  inputs_[0].ids[2] = 500;
  Submit(0, 0);
  Wait(0, 0);
  EXPECT_EQ(backend_.Synchronize().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(link_->EndStep().code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(link_->broken());
}

TEST_F(SimLinkTest, CopiesInTheBackgroundSlowTransfersButNotTheStream) {
  std::vector<float> source(4, 2.0f);
  std::vector<float> target(4, 0.0f);
  backend_.CopyInBackground(target.data(), source.data(), 4 * sizeof(float), 1e6);  // 100 us
  backend_.RecordEvent(Stream::kCopy, 3);
  link_->BeginStep(1);
  Submit(0, 0);
  Wait(0, 0);
  // The experts' bandwidth is shared with it; the sums find the way free again.
  const int64_t slow_ns = std::llround(8 * kExpertNs * 100 / 90);
  const int64_t answer_ns = kGapNs + kRowNs + kLatencyNs + kOverheadNs + slow_ns;
  EXPECT_EQ(ComputeNs(), answer_ns + kLatencyNs + kSumNs);
  EXPECT_EQ(device_.timeline.TimeNs(SimResource::kCopy), 100'000 + kLatencyNs);
  backend_.WaitEvent(Stream::kCompute, 3);
  ASSERT_TRUE(backend_.Synchronize().ok());
  EXPECT_EQ(target, source);
}

}  // namespace
}  // namespace tandem::gpu
