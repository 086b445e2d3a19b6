// The expert ops against a link that computes on the spot.

#include <atomic>

#include "gpu_worker/expert_link.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

// Each thread does the rows r with r mod threads == thread: the answer is sum of weights times x.
class FakeLink : public ExpertLink {
 public:
  FakeLink(int threads, uint32_t hidden) : threads_(threads) {
    limits_.hidden = hidden;
    limits_.max_rows = 64;
    limits_.top_k = 2;
  }
  const shm::BatchLimits& limits() const override { return limits_; }
  bool overlaps() const override { return false; }
  int threads() const override { return threads_; }
  void BeginStep(uint64_t) override { error_ = LinkError::kNone; }
  void Submit(const Submission& s, int thread, int threads) override {
    if (thread == 0) last_ = s;
    submits.fetch_add(1);
    EXPECT_EQ(threads, threads_);
    const uint32_t hidden = limits_.hidden;
    for (int r = thread; r < *s.rows; r += threads) {
      const float weight = s.weights[r * 2] + s.weights[r * 2 + 1];
      for (uint32_t i = 0; i < hidden; ++i) result_[r * hidden + i] = weight * s.x[r * hidden + i];
    }
  }
  void Wait(const Collection& c, int thread, int threads) override {
    if (thread == 0) collection_ = c;
    const uint32_t hidden = limits_.hidden;
    EXPECT_EQ(c.gather, Gather::kAdd);
    for (int r = thread; r < *c.rows; r += threads) {
      for (uint32_t i = 0; i < hidden; ++i) c.out[r * hidden + i] += result_[r * hidden + i];
    }
  }
  absl::Status EndStep() override { return absl::OkStatus(); }
  LinkError error() const override { return error_; }
  bool broken() const override { return false; }
  LayerTimes layer_times(uint32_t, uint32_t) const override { return {}; }

  std::atomic<int> submits{0};
  Submission last_;
  Collection collection_;
  LinkError error_ = LinkError::kNone;

 private:
  int threads_;
  shm::BatchLimits limits_;
  std::vector<float> result_ = std::vector<float>(64 * 64);
};

class ExpertOpsTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ExpertOpsTest, ::testing::Values(1, 2, 3));

TEST_P(ExpertOpsTest, EveryThreadSubmitsAndTheSumIsAdded) {
  const int rows = 7, hidden = 20;
  auto backend = MakeBackend({.threads = GetParam()});
  FakeLink link(GetParam(), hidden);
  const std::vector<float> x = RandomVector(8 * hidden, 1), weights = RandomVector(16, 2);
  const std::vector<uint16_t> ids(16, 3);
  const int32_t count = rows;
  std::vector<float> out(8 * hidden, 1.0f);
  ExpertSubmitArgs submit;
  submit.rows = {.bound = 8, .count = &count};
  submit.link = &link;
  submit.lane = 1;
  submit.layer = 5;
  submit.x = AsMatrix(x, hidden);
  submit.ids = ids.data();
  submit.weights = weights.data();
  backend->ExpertSubmit(submit);
  EXPECT_EQ(link.submits, GetParam());
  EXPECT_EQ(link.last_.lane, 1u);
  EXPECT_EQ(link.last_.layer, 5u);
  EXPECT_EQ(link.last_.max_rows, 8);
  EXPECT_EQ(link.last_.rows, &count);
  EXPECT_EQ(link.last_.ids, ids.data());
  EXPECT_EQ(link.last_.deferred, nullptr);
  backend->ExpertWait(
      {.rows = submit.rows, .link = &link, .lane = 1, .layer = 5, .out = AsMatrix(out, hidden)});
  EXPECT_EQ(link.collection_.layer, 5u);
  for (int r = 0; r < 8; ++r) {
    for (int i = 0; i < hidden; ++i) {
      const float sum = (weights[r * 2] + weights[r * 2 + 1]) * x[r * hidden + i];
      ASSERT_EQ(out[r * hidden + i], r < rows ? 1.0f + sum : 1.0f);
    }
  }
  EXPECT_TRUE(backend->Synchronize().ok());
}

TEST(ExpertOps, SynchronizeReportsTheLinksError) {
  auto backend = MakeBackend();
  FakeLink link(1, 4);
  const std::vector<float> x(4, 1.0f), weights(2, 1.0f);
  const std::vector<uint16_t> ids(2, 0);
  const int32_t count = 1;
  ExpertSubmitArgs submit;
  submit.rows = {.bound = 1, .count = &count};
  submit.link = &link;
  submit.x = AsMatrix(x, 4);
  submit.ids = ids.data();
  submit.weights = weights.data();
  for (const auto& [error, code] : {std::pair{LinkError::kPeerDied, absl::StatusCode::kUnavailable},
                                    std::pair{LinkError::kTimeout, absl::StatusCode::kUnavailable},
                                    std::pair{LinkError::kRefused, absl::StatusCode::kInternal}}) {
    backend->ExpertSubmit(submit);
    link.error_ = error;
    EXPECT_EQ(backend->Synchronize().code(), code);
    EXPECT_TRUE(backend->Synchronize().ok()) << "reported once";
  }
}

}  // namespace
}  // namespace tandem::gpu
