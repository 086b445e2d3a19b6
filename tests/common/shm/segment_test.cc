#include "common/shm/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <utility>

namespace tandem::shm {
namespace {

SegmentLayout TestLayout() {
  return ComputeLayout({.max_rows = 8,
                        .hidden = 32,
                        .top_k = 2,
                        .num_experts = 4,
                        .num_layers = 2,
                        .lanes = 1,
                        .row_type = RowType::kF32},
                       2)
      .value();
}

UniqueFd Duplicate(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

TEST(Segment, IsSharedThroughItsDescriptor) {
  const auto made = Segment::Create(TestLayout(), 11, 22);
  ASSERT_TRUE(made.ok()) << made.status();
  const auto mapped =
      Segment::Map(Duplicate(made->fd()), TestLayout(), made->mapped_bytes(), 11, 22);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  made->view().results(1)[255] = 3.5f;
  EXPECT_EQ(mapped->view().results(1)[255], 3.5f);
  EXPECT_NE(made->view().results(1), mapped->view().results(1));
}

TEST(Segment, CannotBeResizedByEitherSide) {
  const auto made = Segment::Create(TestLayout(), 11, 22);
  ASSERT_TRUE(made.ok());
  const auto bytes = static_cast<off_t>(made->mapped_bytes());
  EXPECT_NE(ftruncate(made->fd(), 0), 0);
  EXPECT_NE(ftruncate(made->fd(), bytes + 4096), 0);
  EXPECT_NE(fcntl(made->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(Segment, MapRefusesWhatWasNotAnnounced) {
  const auto made = Segment::Create(TestLayout(), 11, 22);
  ASSERT_TRUE(made.ok());
  const UniqueFd fd = Duplicate(made->fd());
  const uint64_t bytes = made->mapped_bytes();
  EXPECT_TRUE(Segment::Map(fd, TestLayout(), bytes, 11, 22).ok());
  EXPECT_FALSE(Segment::Map(fd, TestLayout(), bytes, 12, 22).ok());
  EXPECT_FALSE(Segment::Map(fd, TestLayout(), bytes, 11, 23).ok());
  EXPECT_FALSE(Segment::Map(fd, TestLayout(), bytes + 4096, 11, 22).ok());
  SegmentLayout other = TestLayout();
  other.limits.top_k = 1;
  EXPECT_FALSE(Segment::Map(fd, other, bytes, 11, 22).ok());
  made->view().control()->magic ^= 1;
  EXPECT_FALSE(Segment::Map(fd, TestLayout(), bytes, 11, 22).ok());
  EXPECT_FALSE(Segment::Map(UniqueFd(), TestLayout(), bytes, 11, 22).ok());
  const UniqueFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_FALSE(Segment::Map(unsealed, TestLayout(), bytes, 11, 22).ok());
}

TEST(Segment, ARefusedSizeIsAnErrorNotACrash) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limit{.rlim_cur = 64 << 10, .rlim_max = before.rlim_max};
  signal(SIGXFSZ, SIG_IGN);
  ASSERT_GT(TestLayout().segment_bytes, limit.rlim_cur);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const absl::Status status = Segment::Create(TestLayout(), 1, 1).status();
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

TEST(Segment, SaysWhatItsPagesAre) {
  const auto made = Segment::Create(TestLayout(), 1, 1);
  ASSERT_TRUE(made.ok());
  const std::string kind = made->page_kind();
  EXPECT_TRUE(kind == "hugetlb" || kind == "transparent" || kind == "plain") << kind;
}

}  // namespace
}  // namespace tandem::shm
