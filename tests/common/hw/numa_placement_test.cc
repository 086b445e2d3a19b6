#include "common/hw/numa_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/hw/pages.h"
#include "common/hw/topology.h"
#include "tests/fakes/fake_numa_policy.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

class NumaPlacement : public ::testing::Test {
 protected:
  static constexpr size_t kPages = 64;

  NumaPlacement() {
    const auto memfd = CreateMemfd("tandem-test", kPages * page_bytes_, HugePages::kOff);
    EXPECT_TRUE(memfd.ok());
    fd_ = memfd->fd;
  }
  ~NumaPlacement() override { close(fd_); }

  const size_t page_bytes_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  int fd_ = -1;
  testing::FakeNumaPolicy policy_;
};

TEST_F(NumaPlacement, PrefersTheNodeForTheWholeFileToCome) {
  EXPECT_TRUE(PreferNode(fd_, 100 * page_bytes_ + 1, 1, policy_).ok());
  EXPECT_EQ(policy_.preferred_node, 1);
  EXPECT_EQ(policy_.preferred_bytes, 101 * page_bytes_);
}

TEST_F(NumaPlacement, OneNodeNeedsNoCall) {
  policy_.allowed = {0};
  policy_.error = EPERM;
  EXPECT_TRUE(PreferNode(fd_, page_bytes_, 0, policy_).ok());
  EXPECT_EQ(policy_.preferred_node, -1);
}

TEST_F(NumaPlacement, RefusesANodeOutsideOfTheCpuset) {
  policy_.allowed = {0, 1, 3};
  const absl::Status status = PreferNode(fd_, page_bytes_, 2, policy_);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("node 2 is none of the allowed ones (0-1,3)"));
  EXPECT_EQ(policy_.preferred_node, -1);
}

TEST_F(NumaPlacement, SaysThatAContainerRefusesTheCalls) {
  policy_.error = EPERM;
  EXPECT_TRUE(absl::IsPermissionDenied(PreferNode(fd_, page_bytes_, 1, policy_)));
  EXPECT_TRUE(absl::IsPermissionDenied(SamplePlacement(fd_, 16, 1, policy_).status()));
}

TEST_F(NumaPlacement, CountsPagesOfOtherNodes) {
  policy_.layout = {1, 0, 1, 1};
  const auto sample = SamplePlacement(fd_, 16, 1, policy_);
  ASSERT_TRUE(sample.ok()) << sample.status();
  EXPECT_EQ(sample->pages, 16u);
  EXPECT_EQ(sample->misplaced, 4u);
  // Evenly spread: every fourth page.
  ASSERT_EQ(policy_.asked.size(), 16u);
  for (size_t i = 1; i < 16; ++i) {
    EXPECT_EQ(static_cast<char*>(policy_.asked[i]) - static_cast<char*>(policy_.asked[i - 1]),
              static_cast<std::ptrdiff_t>(4 * page_bytes_));
  }
}

TEST_F(NumaPlacement, LeavesOutPagesWithoutANode) {
  policy_.layout = {-ENOENT, 1};
  const auto sample = SamplePlacement(fd_, 1000, 1, policy_);
  ASSERT_TRUE(sample.ok());
  EXPECT_EQ(policy_.asked.size(), kPages);
  EXPECT_EQ(sample->pages, kPages / 2);
  EXPECT_EQ(sample->misplaced, 0u);
}

TEST_F(NumaPlacement, AnEmptyFileHasNoPages) {
  ASSERT_EQ(ftruncate(fd_, 0), 0);
  const auto sample = SamplePlacement(fd_, 16, 1, policy_);
  ASSERT_TRUE(sample.ok());
  EXPECT_EQ(sample->pages, 0u);
}

// The calls themselves, on whatever machine this is.
TEST_F(NumaPlacement, TheKernelKeepsAndTellsThePlace) {
  const KernelNumaPolicy kernel;
  const std::vector<int> allowed = kernel.AllowedNodes();
  if (allowed.empty()) GTEST_SKIP() << "this kernel has no NUMA policy";
  const int node = allowed.back();
  void* base = mmap(nullptr, kPages * page_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  ASSERT_NE(base, MAP_FAILED);
  const int refused = kernel.Prefer(base, kPages * page_bytes_, node);
  std::memset(base, 1, kPages * page_bytes_);
  munmap(base, kPages * page_bytes_);
  if (refused != 0) GTEST_SKIP() << "mbind: " << std::strerror(refused);
  const auto sample = SamplePlacement(fd_, kPages, node, kernel);
  if (absl::IsPermissionDenied(sample.status())) GTEST_SKIP() << sample.status();
  ASSERT_TRUE(sample.ok()) << sample.status();
  EXPECT_EQ(sample->pages, kPages);
  EXPECT_EQ(sample->misplaced, 0u);
}

TEST(CommonNode, IsOneThatAllCpusShare) {
  const std::vector<int> cpus = AllowedCpus();
  const Topology topology = DetectTopology({});
  EXPECT_EQ(CommonNode(topology, {topology.nodes[0].cpus[0]}), topology.nodes[0].id);
  EXPECT_EQ(CommonNode(topology, cpus), topology.nodes.size() == 1 ? topology.nodes[0].id : -1);
  Topology two;
  two.nodes = {{0, {0, 1}, false}, {4, {2, 3}, false}};
  EXPECT_EQ(CommonNode(two, {2, 3}), 4);
  EXPECT_EQ(CommonNode(two, {1, 2}), -1);
  EXPECT_EQ(CommonNode(two, {2, 9}), -1);
  EXPECT_EQ(CommonNode(two, {}), -1);
}

}  // namespace
}  // namespace tandem
