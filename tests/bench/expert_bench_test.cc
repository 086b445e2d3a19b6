// What the expert benchmark is made of: roofs, instructions, and random experts that give finite
// sums in every format.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "expert_worker/kernels/select.h"
#include "expert_worker/kernels/tables.h"
#include "tests/bench/expert_roof.h"
#include "tests/bench/expert_runner.h"

namespace tandem::bench {
namespace {

TEST(Roof, IsTheLaterOfMemoryAndCompute) {
  const Roof memory =
      RoofOf({.bytes = 2e9, .bandwidth_gbps = 20, .operations = 1e9, .peak_gops = 100});
  EXPECT_DOUBLE_EQ(memory.seconds, 0.1);
  EXPECT_TRUE(memory.memory_bound);
  const Roof compute =
      RoofOf({.bytes = 2e9, .bandwidth_gbps = 20, .operations = 3e10, .peak_gops = 100});
  EXPECT_DOUBLE_EQ(compute.seconds, 0.3);
  EXPECT_FALSE(compute.memory_bound);
  EXPECT_TRUE(RoofOf({.bytes = 1, .bandwidth_gbps = 1, .operations = 1e9}).memory_bound);
}

TEST(InstructionOf, FollowsTableAndWidthOfCodes) {
  const auto on = [](const kernels::KernelTable& table, WeightFormat format) {
    return InstructionOf(table, format, false);
  };
  EXPECT_EQ(on(kernels::kAvx2Table, WeightFormat::kInt4F16), &kAvx2Maddubs4);
  EXPECT_EQ(on(kernels::kAvx2Table, WeightFormat::kInt8F16), &kAvx2SignMaddubs);
  EXPECT_EQ(on(kernels::kAvx2Table, WeightFormat::kIq4Nl), &kAvx2SignMaddubs);
  EXPECT_EQ(on(kernels::kAvx2Table, WeightFormat::kQ6K), &kAvx2Maddubs2);
  EXPECT_EQ(on(kernels::kAvx2Table, WeightFormat::kBf16), &kAvx2Fma);
  EXPECT_EQ(InstructionOf(kernels::kAvx2Table, WeightFormat::kQ4K, true), &kAvx2Fma);
  EXPECT_EQ(InstructionOf(kernels::kRefTable, WeightFormat::kQ4K, false), nullptr);
  EXPECT_EQ(on(kernels::kAvx512Table, WeightFormat::kQ4K), &kAvx2Maddubs4);
  EXPECT_EQ(on(kernels::kAvx512Table, WeightFormat::kFp8), &kAvx512Fma);
  EXPECT_EQ(on(kernels::kAvx512VnniTable, WeightFormat::kQ4K), &kAvx512Vpdpbusd);
  EXPECT_EQ(on(kernels::kAvx512VnniTable, WeightFormat::kBf16), &kAvx512Fma);
  EXPECT_EQ(on(kernels::kAvx512VbmiTable, WeightFormat::kFp8), &kAvx512Vdpbf16);
}

class RandomExpertsOf : public ::testing::TestWithParam<FormatCase> {};

TEST_P(RandomExpertsOf, GiveFiniteSums) {
  RunnerOptions options;
  options.table = kernels::SelectKernelTable(Isa::kAvx512, DetectCpuFeatures());
  options.format = GetParam();
  options.shape = {"tiny", 4, 2, 256, 256};
  options.max_rows = 3;
  options.cold = false;
  for (const bool parity : {false, true}) {
    options.parity = parity;
    const auto runner = ExpertRunner::Create(options);
    ASSERT_TRUE(runner.ok()) << runner.status();
    expert::Pool pool({});
    const RowResult result = (*runner)->Measure(pool, 3, {.samples = 1});
    EXPECT_GT(result.us, 0);
    EXPECT_GT(result.share_of_roof, 0);
    const std::vector<float>& out = (*runner)->output();
    ASSERT_EQ(out.size(), 3u * 256);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float v) { return std::isfinite(v); }));
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float v) { return v != 0; }));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, RandomExpertsOf, ::testing::ValuesIn(kFormatCases),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace tandem::bench
