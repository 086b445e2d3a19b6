// The contract of gpu_worker/expert_link.h, the same tests on every implementation and thread
// shape.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "gpu_worker/links/expert_link_set.h"
#include "gpu_worker/links/inprocess_expert_link.h"
#include "gpu_worker/links/shm_expert_link.h"
#include "tests/gpu_worker/links/link_harness.h"

namespace tandem::testing {
namespace {

enum class Kind { kInProcess, kApart, kColocated };

struct Shape {
  std::string name;
  Kind kind = Kind::kInProcess;
  int gpu_threads = 1;
  int expert_threads = 1;
  int workers = 1;
  // Decide the pairs; empty: not pinned.
  std::vector<int> gpu_cpus = {};
  std::vector<int> expert_cpus = {};
};

class ExpertLinkContract : public ::testing::TestWithParam<Shape> {
 protected:
  // Makes the link, with everything on its other side.
  std::unique_ptr<gpu::ExpertLink> Make(const shm::BatchLimits& limits) {
    std::vector<std::unique_ptr<gpu::ExpertLink>> links;
    for (int worker = 0; worker < GetParam().workers; ++worker) {
      links.push_back(GetParam().kind == Kind::kInProcess ? MakeInProcess(limits, worker)
                                                          : MakeShared(limits, worker));
    }
    return std::make_unique<gpu::ExpertLinkSet>(std::move(links));
  }

  StepSpec Spec(uint64_t step, std::vector<int32_t> rows) const {
    return {.step = step,
            .layers = 5,
            .rows_of_lane = std::move(rows),
            .deferred = false,
            .workers = GetParam().workers};
  }

  std::vector<FakeExperts*> experts_;

 private:
  std::unique_ptr<gpu::ExpertLink> MakeInProcess(const shm::BatchLimits& limits, int worker) {
    fakes_.push_back(std::make_unique<FakeExperts>(worker));
    experts_.push_back(fakes_.back().get());
    auto link = gpu::MakeInProcessExpertLink(
        {.limits = limits, .threads = GetParam().gpu_threads, .spin = std::chrono::microseconds(0)},
        fakes_.back().get());
    EXPECT_TRUE(link.ok()) << link.status();
    return std::move(link).value();
  }

  std::unique_ptr<gpu::ExpertLink> MakeShared(const shm::BatchLimits& limits, int worker) {
    const auto placement =
        GetParam().kind == Kind::kApart ? shm::Placement::kApart : shm::Placement::kColocated;
    std::vector<int> cpus = GetParam().expert_cpus;
    if (cpus.empty()) cpus.assign(static_cast<size_t>(GetParam().expert_threads), -1);
    workers_.push_back(std::make_unique<ExpertWorkerThreads>(
        dir_.Socket("expert" + std::to_string(worker) + ".link"), cpus, placement, worker));
    experts_.push_back(&workers_.back()->experts());
    const auto ticket = workers_.back()->Offer(limits);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    auto options = LinkOptions(*ticket, limits, GetParam().gpu_threads);
    options.spin = std::chrono::microseconds(200);
    if (!GetParam().gpu_cpus.empty()) options.thread_cpus = GetParam().gpu_cpus;
    auto link = gpu::AttachShmExpertLink(options);
    EXPECT_TRUE(link.ok()) << link.status();
    return std::move(link).value();
  }

  TempSocketDir dir_;
  std::vector<std::unique_ptr<FakeExperts>> fakes_;
  std::vector<std::unique_ptr<ExpertWorkerThreads>> workers_;
};

TEST_P(ExpertLinkContract, BringsBackTheSumsForAnyRowCount) {
  const auto link = Make(TestLimits());
  int mismatches = 0;
  uint64_t step = 0;
  for (const int32_t rows : {1, 2, 3, 7, 16, 31, 64}) {
    ++step;
    EXPECT_TRUE(RunStep(link.get(), Spec(step, {rows}), step, &mismatches).ok());
    EXPECT_EQ(mismatches, 0) << rows << " rows";
  }
}

TEST_P(ExpertLinkContract, IsExactWithF32Rows) {
  shm::BatchLimits limits = TestLimits();
  limits.row_type = shm::RowType::kF32;
  const auto link = Make(limits);
  int mismatches = 0;
  EXPECT_TRUE(RunStep(link.get(), Spec(1, {9, 5}), 11, &mismatches).ok());
  EXPECT_EQ(mismatches, 0);
}

TEST_P(ExpertLinkContract, KeepsLanesAndStepsApart) {
  const auto link = Make(TestLimits());
  for (FakeExperts* experts : experts_) experts->set_max_delay_us(300);
  int mismatches = 0;
  for (uint64_t step = 1; step <= 20; ++step) {
    const auto rows = static_cast<int32_t>(step % 5);
    EXPECT_TRUE(RunStep(link.get(), Spec(step, {rows + 1, 6 - rows}), step, &mismatches).ok());
  }
  EXPECT_EQ(mismatches, 0);
}

TEST_P(ExpertLinkContract, CarriesDeferredPicksWithinALaneAndStep) {
  const auto link = Make(TestLimits());
  for (FakeExperts* experts : experts_) experts->set_max_delay_us(100);
  int mismatches = 0;
  for (uint64_t step = 1; step <= 10; ++step) {
    StepSpec spec = Spec(step, {4, 3});
    spec.deferred = step % 3 != 0;
    EXPECT_TRUE(RunStep(link.get(), spec, step, &mismatches).ok());
  }
  EXPECT_EQ(mismatches, 0);
}

TEST_P(ExpertLinkContract, TellsWhenTheWorkerWasAtWhat) {
  const auto link = Make(TestLimits());
  int mismatches = 0;
  StepSpec spec = Spec(3, {4, 3});
  spec.deferred = true;
  ASSERT_TRUE(RunStep(link.get(), spec, 1, &mismatches).ok());
  for (uint32_t lane = 0; lane < 2; ++lane) {
    int64_t before_ns = 1;
    for (uint32_t layer = 0; layer < static_cast<uint32_t>(spec.layers); ++layer) {
      const gpu::LayerTimes times = link->layer_times(lane, layer);
      EXPECT_LE(before_ns, times.begin_ns) << lane << " " << layer;
      EXPECT_LE(times.begin_ns, times.reply_ns);
      EXPECT_LE(times.reply_ns, times.end_ns);
      before_ns = times.reply_ns;
    }
  }
}

TEST_P(ExpertLinkContract, TakesZeroRows) {
  const auto link = Make(TestLimits());
  int mismatches = 0;
  EXPECT_TRUE(RunStep(link.get(), Spec(1, {0, 0}), 1, &mismatches).ok());
  EXPECT_TRUE(RunStep(link.get(), Spec(2, {0, 3}), 2, &mismatches).ok());
  EXPECT_EQ(mismatches, 0);
}

// One submission by hand; `out` comes back.
absl::Status SubmitOne(gpu::ExpertLink* link, uint64_t step, const LinkInput& input, int32_t rows,
                       gpu::Gather gather, std::vector<float>* out) {
  link->BeginStep(step);
  RunTeam(link->threads(), [&](int thread) {
    const auto max_rows = static_cast<int32_t>(link->limits().max_rows);
    link->Submit({.lane = input.lane,
                  .layer = input.layer,
                  .flags = 0,
                  .rows = &rows,
                  .max_rows = max_rows,
                  .x = input.x.data(),
                  .ids = input.ids.data(),
                  .weights = input.weights.data(),
                  .deferred = nullptr},
                 thread, link->threads());
    link->Wait({.lane = input.lane,
                .layer = input.layer,
                .rows = &rows,
                .max_rows = max_rows,
                .out = out->data(),
                .gather = gather},
               thread, link->threads());
  });
  return link->EndStep();
}

TEST_P(ExpertLinkContract, AddsWhenAskedTo) {
  const auto link = Make(TestLimits());
  std::mt19937_64 random(3);
  const LinkInput input = RandomInput(&random, link->limits(), 0, 2, 5, false);
  std::vector<float> stored(input.x.size());
  std::vector<float> added(input.x.size(), 0.0f);
  ASSERT_TRUE(SubmitOne(link.get(), 1, input, 5, gpu::Gather::kStore, &stored).ok());
  ASSERT_TRUE(SubmitOne(link.get(), 2, input, 5, gpu::Gather::kAdd, &added).ok());
  EXPECT_EQ(stored, added);
  ASSERT_TRUE(SubmitOne(link.get(), 3, input, 5, gpu::Gather::kAdd, &added).ok());
  EXPECT_NE(stored, added);
}

TEST_P(ExpertLinkContract, SkipsSentinelIds) {
  const auto link = Make(TestLimits());
  std::mt19937_64 random(4);
  LinkInput input = RandomInput(&random, link->limits(), 1, 0, 6, false);
  for (uint16_t& id : input.ids) id = shm::kNoExpert;
  std::vector<float> out(input.x.size(), 5.0f);
  ASSERT_TRUE(SubmitOne(link.get(), 1, input, 6, gpu::Gather::kStore, &out).ok());
  EXPECT_THAT(out, ::testing::Each(0.0f));
}

TEST_P(ExpertLinkContract, RefusesAnExpertIdOutOfRangeAndGoesOn) {
  const auto link = Make(TestLimits());
  std::mt19937_64 random(5);
  for (const int32_t rows : {1, 40}) {
    LinkInput input = RandomInput(&random, link->limits(), 0, 1, rows, false);
    input.ids.back() = static_cast<uint16_t>(link->limits().num_experts);
    std::vector<float> out(input.x.size(), 5.0f);
    const absl::Status status = SubmitOne(link.get(), 1, input, rows, gpu::Gather::kStore, &out);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("expert id out of range"));
    EXPECT_EQ(link->error(), gpu::LinkError::kRefused);
    EXPECT_FALSE(link->broken());
    EXPECT_THAT(out, ::testing::Each(0.0f));
  }
  int mismatches = 0;
  EXPECT_TRUE(RunStep(link.get(), Spec(2, {3, 2}), 6, &mismatches).ok());
  EXPECT_EQ(mismatches, 0);
}

TEST_P(ExpertLinkContract, RefusesALayerOutOfRangeAndGoesOn) {
  const auto link = Make(TestLimits());
  std::mt19937_64 random(6);
  LinkInput input = RandomInput(&random, link->limits(), 0, 0, 2, false);
  input.layer = link->limits().num_layers;
  std::vector<float> out(input.x.size(), 5.0f);
  EXPECT_FALSE(SubmitOne(link.get(), 1, input, 2, gpu::Gather::kStore, &out).ok());
  EXPECT_EQ(link->error(), gpu::LinkError::kRefused);
  int mismatches = 0;
  EXPECT_TRUE(RunStep(link.get(), Spec(2, {3, 2}), 6, &mismatches).ok());
  EXPECT_EQ(mismatches, 0);
}

TEST_P(ExpertLinkContract, RefusesRowCountsOutOfBoundsAndGoesOn) {
  const auto link = Make(TestLimits());
  std::mt19937_64 random(7);
  const LinkInput input = RandomInput(&random, link->limits(), 0, 0, 2, false);
  std::vector<float> out(input.x.size());
  for (const int32_t rows : {-1, 65, 1 << 30}) {
    EXPECT_FALSE(SubmitOne(link.get(), 1, input, rows, gpu::Gather::kStore, &out).ok());
    EXPECT_EQ(link->error(), gpu::LinkError::kBadSubmission);
    EXPECT_FALSE(link->broken());
  }
  int mismatches = 0;
  EXPECT_TRUE(RunStep(link.get(), Spec(2, {3}), 6, &mismatches).ok());
  EXPECT_EQ(mismatches, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Links, ExpertLinkContract,
    ::testing::Values(Shape{"InProcess1", Kind::kInProcess, 1, 1, 1},
                      Shape{"InProcess3", Kind::kInProcess, 3, 1, 1},
                      Shape{"InProcessSet", Kind::kInProcess, 2, 1, 3},
                      Shape{"Apart1x1", Kind::kApart, 1, 1, 1},
                      Shape{"Apart2x3", Kind::kApart, 2, 3, 1},
                      Shape{"ApartSet", Kind::kApart, 2, 1, 3},
                      Shape{"Colocated1x1", Kind::kColocated, 1, 1, 1},
                      Shape{"Colocated2x2", Kind::kColocated, 2, 2, 1},
                      Shape{"Colocated5x2", Kind::kColocated, 5, 2, 1},
                      Shape{"Colocated2x5", Kind::kColocated, 2, 5, 1},
                      Shape{"ColocatedCrossed", Kind::kColocated, 3, 2, 1, {0, 1, 2}, {2, 0}},
                      Shape{"ColocatedPartly", Kind::kColocated, 2, 4, 1, {5, 1}, {0, 1, 2, 3}},
                      Shape{"ColocatedSet", Kind::kColocated, 2, 2, 3}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tandem::testing
