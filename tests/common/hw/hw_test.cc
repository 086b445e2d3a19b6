#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/hw/cpu_features.h"
#include "common/hw/pages.h"
#include "common/hw/topology.h"

namespace tandem {
namespace {

TEST(CpuFeatures, BestIsaFollowsFeatures) {
  CpuFeatures f;
  EXPECT_EQ(f.BestIsa(), Isa::kRef);
  f.avx2 = true;
  EXPECT_EQ(f.BestIsa(), Isa::kAvx2);
  f.avx512 = true;
  EXPECT_EQ(f.BestIsa(), Isa::kAvx512);
  f.amx_tile = f.amx_int8 = true;
  EXPECT_EQ(f.BestIsa(), Isa::kAvx512);
  f.amx_bf16 = true;
  EXPECT_EQ(f.BestIsa(), Isa::kAmx);
}

TEST(CpuFeatures, DetectionAgreesWithTheCompiler) {
  EXPECT_EQ(DetectCpuFeatures().avx2,
            __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0);
}

TEST(Isa, NamesRoundTripAndUnknownIsRefused) {
  for (const Isa isa : {Isa::kRef, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    EXPECT_EQ(*ParseIsa(IsaName(isa)), isa);
  }
  EXPECT_FALSE(ParseIsa("sse9").ok());
}

TEST(CpuList, RoundTripsAndRefusesNonsense) {
  EXPECT_EQ(FormatCpuList({0, 1, 2, 3, 8}), "0-3,8");
  EXPECT_EQ(*ParseCpuList("0-3,8"), (std::vector<int>{0, 1, 2, 3, 8}));
  for (const char* bad : {"", "a", "3-1", "1,,2", "-1", "99999999"}) {
    EXPECT_FALSE(ParseCpuList(bad).ok()) << bad;
  }
}

TEST(NumaOption, ParsesItsThreeForms) {
  EXPECT_EQ(ParseNumaOption("auto")->mode, NumaOption::Mode::kAuto);
  EXPECT_EQ(ParseNumaOption("off")->mode, NumaOption::Mode::kOff);
  EXPECT_EQ(ParseNumaOption("3")->simulated_nodes, 3);
  for (const char* bad : {"0", "65", "many"}) EXPECT_FALSE(ParseNumaOption(bad).ok()) << bad;
}

TEST(Topology, NodesCoverExactlyTheAllowedCpus) {
  const Topology topology = DetectTopology({});
  std::vector<int> all;
  for (const NumaNode& node : topology.nodes) {
    all.insert(all.end(), node.cpus.begin(), node.cpus.end());
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, topology.allowed_cpus);
}

// One allowed CPU and four simulated nodes: every node gets that CPU and nothing else.
TEST(NU_1, PoolsSeeOnlyTheAllowedCpus) {
  const std::vector<int> before = AllowedCpus();
  ASSERT_TRUE(PinThisThread(before.back()).ok());
  const Topology topology = DetectTopology({NumaOption::Mode::kSimulated, 4});
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const int cpu : before) CPU_SET(cpu, &all);
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  EXPECT_EQ(topology.allowed_cpus, std::vector<int>{before.back()});
  ASSERT_EQ(topology.nodes.size(), 4u);
  for (const NumaNode& node : topology.nodes) {
    EXPECT_EQ(node.cpus, std::vector<int>{before.back()});
    EXPECT_TRUE(node.simulated);
  }
}

TEST(Topology, PinningToAnAbsentCpuIsAnError) { EXPECT_FALSE(PinThisThread(8000).ok()); }

TEST(PageBuffer, IsZeroedAndWritableUnderEveryPolicy) {
  for (const HugePages policy : {HugePages::kAuto, HugePages::kOff}) {
    auto buffer = PageBuffer::Allocate(3 << 20, policy);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_GE(buffer->bytes(), size_t{3} << 20);
    auto* bytes = static_cast<unsigned char*>(buffer->data());
    EXPECT_EQ(bytes[0] | bytes[buffer->bytes() - 1], 0);
    std::memset(bytes, 7, buffer->bytes());
  }
}

// The pool is too small: `require` refuses with the exact count, `auto` goes on without.
TEST(NU_5, TooFewHugePagesFallBackOrAreRefusedWithTheCount) {
  const size_t bytes = (FreeHugePages() + 3) * kHugePageBytes - 1;
  const auto refused = PageBuffer::Allocate(bytes, HugePages::kRequire);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find(std::to_string(FreeHugePages() + 3)),
            std::string::npos);
  EXPECT_NE(refused.status().message().find("vm.nr_hugepages"), std::string::npos);
  const auto fallback = PageBuffer::Allocate(bytes, HugePages::kAuto);
  ASSERT_TRUE(fallback.ok());
  EXPECT_NE(fallback->kind(), PageKind::kHugeTlb);
}

TEST(CollapsePages, GivesWholeHugePagesWhateverTheSettingIs) {
  constexpr size_t kBytes = 4 * kHugePageBytes;
  const auto memfd = CreateMemfd("tandem-test", kBytes, HugePages::kOff);
  ASSERT_TRUE(memfd.ok());
  EXPECT_TRUE(IsSharedMemory(memfd->fd));
  void* const hole =
      mmap(nullptr, kBytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(hole, MAP_FAILED);
  const auto aligned = (reinterpret_cast<uintptr_t>(hole) / kHugePageBytes + 1) * kHugePageBytes;
  void* const data = mmap(reinterpret_cast<void*>(aligned), kBytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, memfd->fd, 0);
  ASSERT_NE(data, MAP_FAILED);
  EXPECT_EQ(MappedPageKind(data), PageKind::kPlain);
  auto* bytes = static_cast<unsigned char*>(data);
  // Neither end is a whole page's.
  CollapsePages(bytes + 100, kBytes - 200);
  EXPECT_EQ(std::count(bytes, bytes + kBytes, 0), static_cast<ptrdiff_t>(kBytes));
  std::memset(bytes, 7, kBytes);
  EXPECT_EQ(std::count(bytes, bytes + kBytes, 7), static_cast<ptrdiff_t>(kBytes));
  const PageKind kind = MappedPageKind(data);
  munmap(hole, kBytes + kHugePageBytes);
  close(memfd->fd);
  if (kind == PageKind::kPlain) GTEST_SKIP() << "this kernel refuses them";
}

TEST(Memfd, CanBeSealedAgainstShrinking) {
  const auto memfd = CreateMemfd("tandem-test", 4096, HugePages::kOff);
  ASSERT_TRUE(memfd.ok());
  EXPECT_EQ(memfd->kind, PageKind::kPlain);
  ASSERT_EQ(fcntl(memfd->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_NE(ftruncate(memfd->fd, 0), 0);
  close(memfd->fd);
}

}  // namespace
}  // namespace tandem
