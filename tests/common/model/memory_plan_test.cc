// The budget, the memory that a made-up /proc and /sys leave, and trial NU-3.

#include "common/model/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/model/model_loader.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kGib = uint64_t{1} << 30;

std::string Gib(double count) {
  return std::to_string(static_cast<uint64_t>(count * static_cast<double>(kGib)));
}

TEST(MemoryPlan, Trial_NU_3_PageCacheOfTheCgroupIsFree) {
  testing::TempDir root;
  root.Write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n");
  root.Write("proc/self/cgroup", "0::/\n");
  root.Write("sys/fs/cgroup/memory.max", Gib(8) + "\n");
  root.Write("sys/fs/cgroup/memory.current", Gib(7.5) + "\n");
  root.Write("sys/fs/cgroup/memory.stat",
             "anon 1000\ninactive_file " + Gib(6) + "\nactive_file " + Gib(0.5) + "\n");
  const auto host = ReadHostMemory(root.path());
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_GE(host->available_bytes, static_cast<uint64_t>(6.5 * kGib));
  EXPECT_EQ(host->available_bytes, 7 * kGib);
  const MemoryPlan plan = MakeMemoryPlan({.expert_bytes = {5 * kGib}}, *host);
  EXPECT_TRUE(plan.Check().ok()) << plan.Check();
  EXPECT_THAT(plan.ToString(), HasSubstr("available (/sys/fs/cgroup/memory.max)"));
  EXPECT_THAT(plan.ToString(), HasSubstr("7.00 GiB"));
}

TEST(HostMemory, TakesTheLeastOfTheAncestors) {
  testing::TempDir root;
  root.Write("proc/meminfo", "MemAvailable: 33554432 kB\n");
  root.Write("proc/self/cgroup", "0::/pod/container\n");
  root.Write("sys/fs/cgroup/pod/memory.max", Gib(4));
  root.Write("sys/fs/cgroup/pod/memory.current", Gib(1));
  root.Write("sys/fs/cgroup/pod/container/memory.max", "max\n");
  root.Write("sys/fs/cgroup/pod/container/memory.current", Gib(1));
  const auto host = ReadHostMemory(root.path());
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->available_bytes, 3 * kGib);
  EXPECT_EQ(host->limited_by, "/sys/fs/cgroup/pod/memory.max");
}

TEST(HostMemory, ReadsVersionOneBehindAnInvisiblePath) {
  testing::TempDir root;
  root.Write("proc/meminfo", "MemAvailable: 33554432 kB\n");
  root.Write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n");
  root.Write("sys/fs/cgroup/memory/memory.limit_in_bytes", Gib(2));
  root.Write("sys/fs/cgroup/memory/memory.usage_in_bytes", Gib(1.5));
  root.Write("sys/fs/cgroup/memory/memory.stat",
             "inactive_file 1\ntotal_inactive_file " + Gib(0.25) + "\ntotal_active_file 0\n");
  const auto host = ReadHostMemory(root.path());
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->available_bytes, static_cast<uint64_t>(0.75 * kGib));
}

TEST(HostMemory, MeminfoAloneIsEnoughAndNothingIsAnError) {
  testing::TempDir root;
  EXPECT_EQ(ReadHostMemory(root.path()).status().code(), absl::StatusCode::kUnavailable);
  root.Write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 64 kB\n");
  const auto host = ReadHostMemory(root.path());
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->available_bytes, 64u * 1024);
  EXPECT_EQ(host->limited_by, "/proc/meminfo");
}

TEST(HostMemory, UsageAboveTheLimitLeavesNothing) {
  testing::TempDir root;
  root.Write("proc/meminfo", "MemAvailable: 64 kB\n");
  root.Write("sys/fs/cgroup/memory.max", "100");
  root.Write("sys/fs/cgroup/memory.current", "200");
  EXPECT_EQ(ReadHostMemory(root.path())->available_bytes, 0u);
}

TEST(HostMemory, ThisMachineHasSome) {
  const auto host = ReadHostMemory();
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_GT(host->available_bytes, 0u);
}

TEST(MemoryPlan, RefusesWithTheBudgetOnOneLine) {
  const PlanRequest request = {.dense_bytes = kGib,
                               .expert_bytes = {kGib / 2 * 9, kGib / 2 * 3},
                               .kv_bytes_per_token = 1024,
                               .kv_tokens = 1 << 20,
                               .link_bytes_per_worker = kGib / 4};
  const MemoryPlan plan = MakeMemoryPlan(request, {4 * kGib, "/proc/meminfo"});
  EXPECT_EQ(plan.needed_bytes, kGib + 6 * kGib + kGib + kGib / 2);
  const std::string text(plan.Check().message());
  EXPECT_EQ(plan.Check().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(text, HasSubstr("8.50 GiB needed, 4.00 GiB available (/proc/meminfo)"));
  EXPECT_THAT(text, HasSubstr("routed experts, worker 0 4.50 GiB"));
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_THAT(plan.ToString(), HasSubstr("key/value cache, 1048576 tokens of 1024 B"));
  EXPECT_TRUE(MakeMemoryPlan(request, {plan.needed_bytes, ""}).Check().ok());
}

TEST(MemoryPlan, MeasuresAGoldenModel) {
  const auto dir = testing::SharedPath("golden/models/qwen3_moe");
  if (!dir) GTEST_SKIP() << "no golden/models/qwen3_moe";
  const auto checkpoint = Checkpoint::Open(*dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto spec = LoadModelSpec(**checkpoint);
  ASSERT_TRUE(spec.ok()) << spec.status();
  const uint64_t attention = (96 + 48 + 48 + 96) * 64 * 2, norms = (64 + 64 + 24 + 24) * 4;
  const uint64_t dense_mlp = 3 * 80 * 64 * 2, routers = 2 * 8 * 64 * 2, ends = 2 * 256 * 64 * 2;
  EXPECT_EQ(DenseWeightBytes(**checkpoint, *spec),
            3 * (attention + norms) + dense_mlp + routers + ends + 64 * 4);
  EXPECT_EQ(KvBytesPerToken(*spec, DType::kF32), 3u * 2 * 2 * 24 * 4);
}

TEST(MemoryPlan, LinearsStayBf16OrBecomeF32) {
  ModelSpec spec;
  spec.hidden = 32;
  LayerSpec& layer = spec.layers.emplace_back();
  layer.dense_intermediate = 16;
  layer.mlp.up.weight = "up_proj.weight";
  const auto bytes = [&](const testing::SafetensorsBuilder& tensors) {
    testing::TempDir dir;
    dir.Write("model.safetensors", tensors.Build());
    const auto checkpoint = Checkpoint::Open(dir.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? DenseWeightBytes(**checkpoint, spec) : 0;
  };
  const uint64_t bf16 = bytes(testing::SafetensorsBuilder().Add("up_proj.weight", "BF16", {16, 32},
                                                                std::string(1024, '\0')));
  // Packed linears have no tensor of the weight's own name.
  const uint64_t packed = bytes(testing::SafetensorsBuilder().Add("up_proj.weight_packed", "I32",
                                                                  {16, 4}, std::string(256, '\0')));
  EXPECT_EQ(packed, bf16 + uint64_t{16} * 32 * 2);
}

TEST(MemoryPlan, LatentCacheKeepsTheLatentOnly) {
  ModelSpec spec;  // DeepSeek-V3: 61 layers of 512 + 64 numbers, notes/models.md 4c
  spec.layers.resize(61);
  spec.attention = {.kind = AttentionKind::kMla, .heads = 128, .kv_lora_rank = 512, .rope_dim = 64};
  EXPECT_EQ(KvBytesPerToken(spec, DType::kBF16), 70272u);
}

TEST(MemoryPlan, FormatsBytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(5 * kGib * 1024), "5.00 TiB");
}

}  // namespace
}  // namespace tandem
