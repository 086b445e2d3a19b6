#include "gpu_worker/hot_experts/counts_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/testing/shared_data.h"

namespace tandem::gpu {
namespace {

constexpr uint64_t kModel = 0x1234;

class CountsFileTest : public ::testing::Test {
 protected:
  CountsFileTest()
      : dir_(std::filesystem::path(::testing::TempDir()) /
             ("counts_" +
              std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()))),
        path_(CountsPath(dir_.string(), kModel)) {
    std::filesystem::remove_all(dir_);
    const uint16_t picks[] = {1, 3, 3};
    for (int step = 0; step < 5; ++step) {
      counts_.Add(step % 2, picks);
      counts_.EndStep();
    }
  }
  ~CountsFileTest() override { std::filesystem::remove_all(dir_); }

  absl::Status Load(uint64_t model, ExpertCounts* counts) const {
    return LoadCounts(path_, model, counts);
  }
  void ExpectUntouched(const ExpertCounts& counts) {
    EXPECT_EQ(counts.steps(), 0U);
    EXPECT_EQ(counts.count(0, 3), 0);
  }

  const std::filesystem::path dir_;
  const std::string path_;
  ExpertCounts counts_{{.layers = 2, .experts = 4}};
  ExpertCounts other_{{.layers = 2, .experts = 4}};
};

TEST_F(CountsFileTest, HoldsWhatWasSaved) {
  ASSERT_TRUE(SaveCounts(path_, kModel, counts_).ok());
  ASSERT_TRUE(Load(kModel, &other_).ok());
  EXPECT_EQ(other_.steps(), 5U);
  for (int layer = 0; layer < 2; ++layer) {
    for (int expert = 0; expert < 4; ++expert) {
      EXPECT_NEAR(other_.count(layer, expert), counts_.count(layer, expert), 1e-5);
    }
  }
  EXPECT_GT(other_.count(0, 3), other_.count(0, 1));
}

TEST_F(CountsFileTest, SavingAgainReplaces) {
  ASSERT_TRUE(SaveCounts(path_, kModel, counts_).ok());
  counts_.EndStep();
  ASSERT_TRUE(SaveCounts(path_, kModel, counts_).ok());
  ASSERT_TRUE(Load(kModel, &other_).ok());
  EXPECT_EQ(other_.steps(), 6U);
}

TEST_F(CountsFileTest, IsNotFoundAtFirst) { EXPECT_TRUE(absl::IsNotFound(Load(kModel, &other_))); }

TEST_F(CountsFileTest, RefusesAnotherModelOrShape) {
  ASSERT_TRUE(SaveCounts(path_, kModel, counts_).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Load(kModel + 1, &other_)));
  ExpectUntouched(other_);
  ExpertCounts wider({.layers = 2, .experts = 5});
  EXPECT_TRUE(absl::IsFailedPrecondition(Load(kModel, &wider)));
}

TEST_F(CountsFileTest, RefusesEveryTornAndFlippedFile) {
  ASSERT_TRUE(SaveCounts(path_, kModel, counts_).ok());
  const std::string whole = testing::ReadWholeFile(path_);
  const auto write = [&](const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  };
  for (size_t bytes = 0; bytes < whole.size(); bytes += 7) {
    write(whole.substr(0, bytes));
    EXPECT_FALSE(Load(kModel, &other_).ok()) << bytes;
  }
  write(whole + "x");
  EXPECT_TRUE(absl::IsDataLoss(Load(kModel, &other_)));
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
    write(flipped);
    EXPECT_FALSE(Load(kModel, &other_).ok()) << at;
  }
  ExpectUntouched(other_);
}

TEST_F(CountsFileTest, SaysWhereItCannotWrite) {
  std::filesystem::create_directories(dir_);
  std::ofstream(dir_ / "file") << "x";
  const absl::Status status = SaveCounts((dir_ / "file" / "counts").string(), kModel, counts_);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

}  // namespace
}  // namespace tandem::gpu
