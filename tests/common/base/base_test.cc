#include <gtest/gtest.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/status.h"

namespace tandem {
namespace {

absl::StatusOr<int> Half(int x) {
  if (x % 2 != 0) return absl::InvalidArgumentError("odd");
  return x / 2;
}

absl::StatusOr<int> Quarter(int x) {
  ASSIGN_OR_RETURN(const int half, Half(x));
  ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

absl::Status MustBeEven(int x) {
  RETURN_IF_ERROR(Half(x).status());
  return absl::OkStatus();
}

TEST(Status, MacrosPassValuesAndErrorsOn) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(6).status().message(), "odd");
  EXPECT_TRUE(MustBeEven(2).ok());
  EXPECT_EQ(MustBeEven(3).code(), absl::StatusCode::kInvalidArgument);
}

TEST(Status, AnnotateKeepsCodeAndPutsContextFirst) {
  const absl::Status status = Annotate(absl::NotFoundError("gone"), "model.safetensors");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "model.safetensors: gone");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "x").ok());
}

TEST(Clock, FakeMovesOnlyWhenTold) {
  FakeClock clock;
  const int64_t start = clock.NowNs();
  EXPECT_EQ(clock.NowNs(), start);
  clock.AdvanceNs(250);
  EXPECT_EQ(clock.NowNs(), start + 250);
}

TEST(Clock, SteadyNeverGoesBack) {
  const SteadyClock clock;
  const int64_t first = clock.NowNs();
  EXPECT_GE(clock.NowNs(), first);
}

TEST(CheckDeathTest, NamesTheCondition) { EXPECT_DEATH(TANDEM_CHECK(1 + 1 == 3), "1 \\+ 1 == 3"); }

}  // namespace
}  // namespace tandem
