// The copier and the step thread: what lies where, faults of the source, counts over a restart; on
// the CPU backend with a source that the test holds.

#include "gpu_worker/hot_experts/hot_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <vector>

#include "gpu_worker/hot_experts/counts_file.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

using ::testing::HasSubstr;

constexpr int kExperts = 8;
constexpr int kHidden = 32;
constexpr int kIntermediate = 16;

// Experts whose weights say which they are; a step may hold the next copy up.
class FakeSource final : public ExpertWeightSource {
 public:
  absl::Status Read(int layer, int expert, CanonicalExpert* out) override {
    std::unique_lock lock(mutex_);
    reads.emplace_back(layer, expert);
    entered_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !held_; });
    if (failing) return absl::UnavailableError("the worker is lost");
    out->gate_up.Reshape({WeightFormat::kF32, 0}, 2 * kIntermediate, kHidden);
    out->down.Reshape({WeightFormat::kF32, 0}, kHidden, kIntermediate);
    std::fill(out->gate_up.elements.begin(), out->gate_up.elements.end(), uint8_t{0});
    std::fill(out->down.elements.begin(), out->down.elements.end(), uint8_t{0});
    return absl::OkStatus();
  }
  bool available() const override { return !lost; }
  void Hold(bool hold) {
    const std::lock_guard lock(mutex_);
    held_ = hold;
    entered_ = false;
    changed_.notify_all();
  }
  // Whether a copy is in Read, or was, since Hold.
  bool entered() {
    const std::lock_guard lock(mutex_);
    return entered_;
  }

  std::atomic<bool> failing{false};
  std::atomic<bool> lost{false};
  std::vector<std::pair<int, int>> reads;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  bool entered_ = false;
};

class HotExpertsTest : public ::testing::Test {
 protected:
  HotExpertsTest()
      : dir_(std::filesystem::path(::testing::TempDir()) /
             ("hot_" +
              std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()))),
        backend_(MakeBackend()) {
    std::filesystem::remove_all(dir_);
    shape_.hidden = kHidden;
    shape_.intermediate = kIntermediate;
    shape_.top_k = 2;
    shape_.formats.assign(4, {{WeightFormat::kF32, 0}, {WeightFormat::kF32, 0}});
    shape_.has_experts = {0, 1, 0, 1};
    shape_.budget_bytes = 1 << 20;
    options_.model_hash = 5;
    options_.experts = kExperts;
    options_.moe_layers = {1, 3};
    options_.state_dir = dir_.string();
    options_.policy.min_steps = 2;
  }
  ~HotExpertsTest() override { std::filesystem::remove_all(dir_); }

  void Make() {
    auto hot = HotExperts::Create(*backend_, shape_, source_, options_);
    ASSERT_TRUE(hot.ok()) << hot.status();
    hot_ = *std::move(hot);
  }
  // A step in which both layers pick these experts.
  void Step(const std::vector<uint16_t>& picks) {
    hot_->BeginStep();
    for (int layer = 0; layer < 2; ++layer) hot_->Count(layer, picks);
    hot_->EndStep();
  }
  void StepAndCopy(const std::vector<uint16_t>& picks) {
    Step(picks);
    hot_->WaitForCopies();
  }
  // A step that finds the copier's lock taken hands over nothing.
  void StepUntilACopyIsHeldUp() {
    source_.Hold(true);
    do {
      Step({3});
      std::this_thread::yield();
    } while (!source_.entered());
  }
  uint16_t SlotOf(int moe_layer, int expert) const {
    return hot_->residents().slot_of_expert[moe_layer * kExperts + expert];
  }
  std::set<uint16_t> Residents(int moe_layer) const {
    std::set<uint16_t> experts;
    for (uint16_t e = 0; e < kExperts; ++e) {
      if (SlotOf(moe_layer, e) != kNoExpert) experts.insert(e);
    }
    return experts;
  }

  const std::filesystem::path dir_;
  std::unique_ptr<CpuBackend> backend_;
  ResidentShape shape_;
  HotExpertsOptions options_;
  FakeSource source_;
  std::unique_ptr<HotExperts> hot_;
};

TEST_F(HotExpertsTest, BusiestBecomeResidentBetweenTwoSteps) {
  Make();
  EXPECT_EQ(hot_->counters().slots, 2U * kExperts + 8);
  StepAndCopy({3, 6});
  StepAndCopy({3, 6});
  EXPECT_TRUE(Residents(0).empty()) << "the table changes between steps only";
  hot_->BeginStep();
  EXPECT_EQ(Residents(0), (std::set<uint16_t>{3, 6}));
  EXPECT_EQ(Residents(1), (std::set<uint16_t>{3, 6}));
  EXPECT_EQ(hot_->counters().migrations, 4U);
  EXPECT_EQ(hot_->counters().resident_experts, 4U);
  EXPECT_GT(hot_->counters().resident_bytes, 0U);
  // Layers of the model, not of the table.
  EXPECT_EQ(source_.reads[0].first % 2, 1);
}

TEST_F(HotExpertsTest, StepsGoOnWhileACopyTakesLong) {
  Make();
  StepUntilACopyIsHeldUp();
  for (int i = 0; i < 100; ++i) Step({3});
  EXPECT_TRUE(Residents(0).empty());
  source_.Hold(false);
  hot_->WaitForCopies();
  hot_->BeginStep();
  EXPECT_EQ(Residents(0), (std::set<uint16_t>{3}));
}

TEST_F(HotExpertsTest, ShiftReplacesResidentsWithinTheBudget) {
  const uint64_t slot_bytes = (*backend_->MakeResidentExperts([this] {
                                ResidentShape shape = shape_;
                                shape.max_slots = 1;
                                return shape;
                              }()))
                                  ->slot_bytes();
  shape_.budget_bytes = 5 * slot_bytes;  // four residents and a spare slot
  Make();
  EXPECT_EQ(hot_->counters().slots, 5U);
  for (int i = 0; i < 50; ++i) StepAndCopy({1, 2});
  EXPECT_EQ(Residents(0), (std::set<uint16_t>{1, 2}));
  for (int i = 0; i < 200; ++i) StepAndCopy({4, 5});
  EXPECT_EQ(Residents(0), (std::set<uint16_t>{4, 5}));
  EXPECT_EQ(Residents(1), (std::set<uint16_t>{4, 5}));
  std::set<uint16_t> slots;
  for (int layer = 0; layer < 2; ++layer) {
    for (const uint16_t e : Residents(layer)) slots.insert(SlotOf(layer, e));
  }
  EXPECT_EQ(slots.size(), 4U);
  EXPECT_EQ(hot_->counters().resident_experts, 4U);
}

TEST_F(HotExpertsTest, FailedCopiesPauseAndAreTriedAgain) {
  Make();
  source_.failing = true;
  StepAndCopy({3});
  StepAndCopy({3});
  StepAndCopy({3});
  EXPECT_EQ(hot_->counters().failed_copies, 2U);
  const size_t reads = source_.reads.size();
  source_.failing = false;
  for (uint64_t i = 0; i < HotExperts::kPauseSteps - 2; ++i) StepAndCopy({3});
  EXPECT_EQ(source_.reads.size(), reads);
  for (int i = 0; i < 4; ++i) StepAndCopy({3});
  EXPECT_EQ(Residents(0), (std::set<uint16_t>{3}));
}

TEST_F(HotExpertsTest, NothingIsBegunWhileTheSourceIsNotAvailable) {
  Make();
  source_.lost = true;
  for (int i = 0; i < 20; ++i) StepAndCopy({3});
  EXPECT_TRUE(source_.reads.empty());
  source_.lost = false;
  StepAndCopy({3});
  hot_->BeginStep();
  EXPECT_EQ(Residents(0), (std::set<uint16_t>{3}));
}

TEST_F(HotExpertsTest, PromptsAreNotStreamedWhileTheSourceIsNotAvailable) {
  options_.stream_prompts = true;
  options_.fixed_streamed = 2;
  Make();
  hot_->BeginStep();
  EXPECT_NE(hot_->BeginStream(64), nullptr);
  source_.lost = true;
  EXPECT_EQ(hot_->BeginStream(64), nullptr);
}

TEST_F(HotExpertsTest, RestartBeginsWarm) {
  Make();
  for (int i = 0; i < 30; ++i) StepAndCopy({7});
  hot_.reset();
  options_.policy.min_steps = 16;
  Make();
  StepAndCopy({});
  hot_->BeginStep();
  EXPECT_EQ(Residents(0), (std::set<uint16_t>{7}));
}

TEST_F(HotExpertsTest, ForeignAndTornCountsMeanAColdStart) {
  Make();
  for (int i = 0; i < 30; ++i) StepAndCopy({7});
  hot_.reset();
  const std::string path = CountsPath(dir_.string(), 5);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  options_.policy.min_steps = 16;
  Make();
  StepAndCopy({});
  hot_->BeginStep();
  EXPECT_TRUE(Residents(0).empty());
}

TEST_F(HotExpertsTest, CountsAreSavedWhileItRuns) {
  Make();
  for (uint64_t i = 0; i <= HotExperts::kSaveSteps; ++i) Step({7});
  hot_->WaitForCopies();
  // A step may have found the lock taken.
  Step({7});
  hot_->WaitForCopies();
  EXPECT_TRUE(std::filesystem::exists(CountsPath(dir_.string(), 5)));
}

TEST_F(HotExpertsTest, EndsWhileACopyIsHeldUp) {
  Make();
  StepUntilACopyIsHeldUp();
  std::thread release([this] { source_.Hold(false); });
  hot_.reset();
  release.join();
}

// The least that the error names is enough, and a kilobyte less is not.
TEST_F(HotExpertsTest, BudgetThatHoldsNothingIsRefusedNamingTheLeastThatDoes) {
  shape_.budget_bytes = 2000;
  const absl::Status status = HotExperts::Create(*backend_, shape_, source_, options_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("--hot-experts-gb=0.000002 "));
  const std::string least = "At least --hot-experts-gb=";
  ASSERT_THAT(message, HasSubstr(least));
  const double gb = std::stod(message.substr(message.find(least) + least.size()));
  const auto bytes = static_cast<uint64_t>(std::llround(gb * 1e9));
  shape_.budget_bytes = bytes - 1000;
  EXPECT_FALSE(HotExperts::Create(*backend_, shape_, source_, options_).ok());
  shape_.budget_bytes = bytes;
  Make();
  for (int i = 0; i < 3; ++i) StepAndCopy({3});
  hot_->BeginStep();
  EXPECT_EQ(hot_->counters().resident_experts, 1u);
}

}  // namespace
}  // namespace tandem::gpu
