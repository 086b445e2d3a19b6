// Two expert workers behind the shared-memory link, on the shipped model, against plain double sums
// over the checkpoint; the same bits again after a new attachment.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/model/expert_tensors.h"
#include "common/model/model_loader.h"
#include "expert_worker/expert_worker.h"
#include "expert_worker/kernels/select.h"
#include "gpu_worker/links/expert_link_set.h"
#include "gpu_worker/links/shm_expert_link.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::expert {
namespace {

constexpr uint32_t kRows = 5;
constexpr uint32_t kLayer = 2;

class WorkerLinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto path = tandem::testing::SharedPath("models/tandem-tiny");
    if (!path) GTEST_SKIP() << "no models/tandem-tiny";
    model_ = path->string();
    auto checkpoint = Checkpoint::Open(model_);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = std::move(*checkpoint);
    const auto spec = LoadModelSpec(*checkpoint_);
    ASSERT_TRUE(spec.ok()) << spec.status();
    spec_ = *spec;
    std::mt19937 rng(11);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    const size_t picks = size_t{kRows} * spec_.moe.top_k;
    for (size_t i = 0; i < size_t{kRows} * spec_.hidden; ++i) x_.push_back(normal(rng));
    for (size_t i = 0; i < picks; ++i) {
      ids_.push_back(static_cast<uint16_t>((i * 7) % static_cast<size_t>(spec_.moe.experts)));
      weights_.push_back(std::fabs(normal(rng)));
    }
    ids_[3] = shm::kNoExpert;
  }

  std::unique_ptr<ExpertWorker> Load(uint32_t index, const std::vector<uint32_t>& shares) {
    ExpertWorker::Options options;
    options.link_socket = dir_.path().string() + "/e" + std::to_string(index) + ".link";
    options.kernels = kernels::SelectKernelTable(Isa::kAmx, DetectCpuFeatures());
    options.threads = 2;
    options.placement = shm::Placement::kColocated;
    auto worker = std::make_unique<ExpertWorker>(options);
    EXPECT_TRUE(worker->StartLoad({model_, index, shares}).ok());
    const auto info = worker->WaitForLoad(std::chrono::seconds(60));
    EXPECT_EQ(info.phase, ExpertWorker::Phase::kReady) << info.error;
    return worker;
  }

  std::unique_ptr<gpu::ExpertLink> Attach(ExpertWorker& worker) {
    const auto attached =
        worker.Attach({kRows, static_cast<uint32_t>(spec_.hidden),
                       static_cast<uint32_t>(spec_.moe.top_k), 1, shm::RowType::kF32});
    EXPECT_TRUE(attached.ok()) << attached.status();
    gpu::ShmLinkOptions options;
    options.ticket = attached->ticket;
    options.model_hash = attached->model_hash;
    options.limits = {.max_rows = kRows,
                      .hidden = static_cast<uint32_t>(spec_.hidden),
                      .top_k = static_cast<uint32_t>(spec_.moe.top_k),
                      .num_experts = static_cast<uint32_t>(spec_.moe.experts),
                      .num_layers = static_cast<uint32_t>(spec_.layers.size()),
                      .lanes = 1,
                      .row_type = shm::RowType::kF32};
    options.thread_cpus = {-1};
    options.placement = shm::Placement::kColocated;
    auto link = gpu::AttachShmExpertLink(options);
    EXPECT_TRUE(link.ok()) << link.status();
    return std::move(*link);
  }

  std::vector<float> RunStep(gpu::ExpertLink& link) {
    const int32_t rows = kRows;
    std::vector<float> out(x_.size());
    gpu::Submission submission;
    submission.layer = kLayer;
    submission.rows = &rows;
    submission.max_rows = kRows;
    submission.x = x_.data();
    submission.ids = ids_.data();
    submission.weights = weights_.data();
    gpu::Collection collection;
    collection.layer = kLayer;
    collection.rows = &rows;
    collection.max_rows = kRows;
    collection.out = out.data();
    link.BeginStep(++step_);
    link.Submit(submission, 0, 1);
    link.Wait(collection, 0, 1);
    const absl::Status status = link.EndStep();
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }

  // The sums in double, from the checkpoint.
  std::vector<double> Exact() {
    const auto tensors = ExpertTensors::Create(*checkpoint_, spec_);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    const int64_t hidden = spec_.hidden, width = spec_.moe.intermediate;
    std::vector<double> out(x_.size(), 0.0);
    std::vector<float> gate(static_cast<size_t>(hidden * width)), up(gate), down(gate);
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (ids_[i] == shm::kNoExpert) continue;
      const auto read = [&](ExpertPart part, Range rows, Range cols, std::vector<float>& to) {
        EXPECT_TRUE(tensors->Read(kLayer, ids_[i], part, rows, cols, DType::kF32, to.data()).ok());
      };
      read(ExpertPart::kGate, {0, width}, {0, hidden}, gate);
      read(ExpertPart::kUp, {0, width}, {0, hidden}, up);
      read(ExpertPart::kDown, {0, hidden}, {0, width}, down);
      const size_t row = i / static_cast<size_t>(spec_.moe.top_k);
      for (int64_t f = 0; f < width; ++f) {
        double g = 0, u = 0;
        for (int64_t j = 0; j < hidden; ++j) {
          const double value = x_[row * hidden + j];
          g += value * static_cast<double>(gate[f * hidden + j]);
          u += value * static_cast<double>(up[f * hidden + j]);
        }
        const double act = static_cast<double>(weights_[i]) * g / (1 + std::exp(-g)) * u;
        for (int64_t o = 0; o < hidden; ++o) {
          out[row * hidden + o] += act * static_cast<double>(down[o * width + f]);
        }
      }
    }
    return out;
  }

  tandem::testing::TempDir dir_;
  std::string model_;
  std::unique_ptr<Checkpoint> checkpoint_;
  ModelSpec spec_;
  std::vector<float> x_, weights_;
  std::vector<uint16_t> ids_;
  uint64_t step_ = 0;
};

TEST_F(WorkerLinkTest, WorkersWithAnySharesGiveTheSumOverTheCheckpoint) {
  const std::vector<double> want = Exact();
  double largest = 0;
  for (double v : want) largest = std::max(largest, std::fabs(v));
  for (const auto& shares : std::vector<std::vector<uint32_t>>{{1}, {1, 1}, {3, 1}, {1, 0}}) {
    std::vector<std::unique_ptr<ExpertWorker>> workers;
    for (uint32_t i = 0; i < shares.size(); ++i) workers.push_back(Load(i, shares));
    std::vector<float> first;
    for (int attachment = 0; attachment < 2; ++attachment) {
      std::vector<std::unique_ptr<gpu::ExpertLink>> links;
      for (auto& worker : workers) links.push_back(Attach(*worker));
      gpu::ExpertLinkSet set(std::move(links));
      const std::vector<float> got = RunStep(set);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], 1e-5 * largest) << "shares " << shares.size();
      }
      if (attachment == 0) first = got;
      EXPECT_EQ(first, got);
    }
  }
}

}  // namespace
}  // namespace tandem::expert
