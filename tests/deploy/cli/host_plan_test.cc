// What a model is said to need of a host: packed experts by the bytes that the engine packs.

#include "deploy/cli/host_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <string>

#include "common/model/model_loader.h"
#include "common/quantize/quantize_checkpoint.h"
#include "expert_worker/engine/model_experts.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kShipped = (testing::SourceRoot() / "deploy/models/tandem-tiny").string();
constexpr uint64_t kPlenty = uint64_t{1} << 40;

struct Model {
  std::unique_ptr<Checkpoint> checkpoint;
  ModelSpec spec;

  explicit Model(const std::string& dir) {
    auto opened = Checkpoint::Open(dir);
    EXPECT_TRUE(opened.ok()) << opened.status();
    checkpoint = *std::move(opened);
    auto loaded = LoadModelSpec(*checkpoint);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    spec = *std::move(loaded);
  }
  absl::StatusOr<HostPlan> Plan(const std::vector<uint32_t>& shares, uint64_t available = kPlenty,
                                const ServeOptions& options = {}) const {
    return PlanHost(options, spec, *checkpoint, shares, {available, "/proc/meminfo"});
  }
};

uint64_t Sum(const std::vector<uint64_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}

TEST(PlanHost, PackedExpertsCountAsTheFileThatHoldsThem) {
  struct Case {
    const char* name;
    EncodeTarget target;
    double bits;  // of a weight, scales included
  };
  const auto unquantized = Model(kShipped).Plan({1});
  ASSERT_TRUE(unquantized.ok()) << unquantized.status();
  for (const Case& c : {Case{"int8", {WeightFormat::kInt8Bf16, 0, 1}, 8.25},
                        Case{"int4", {WeightFormat::kInt4Bf16, 32, 1}, 4.5},
                        Case{"mxfp4", {WeightFormat::kMxfp4, 32, 1}, 4.25}}) {
    SCOPED_TRACE(c.name);
    testing::TempDir dir;
    const std::string path = dir.path() / "model";
    QuantizeRequest request;
    request.model_dir = kShipped;
    request.output_dir = path;
    request.target = c.target;
    const auto report = QuantizeCheckpoint(request, [](uint64_t, uint64_t) { return true; });
    ASSERT_TRUE(report.ok()) << report.status();
    const Model model(path);
    const auto plan = model.Plan({1});
    ASSERT_TRUE(plan.ok()) << plan.status();
    expert::LoadProgress progress;
    const auto packed = expert::PackModel(path, dir.path() / "state", 1, &progress);
    ASSERT_TRUE(packed.ok()) << packed.status();
    ASSERT_EQ(plan->expert_bytes.size(), 1u);
    EXPECT_EQ(plan->expert_bytes[0], std::filesystem::file_size(packed->path()));
    // Layers, experts, parts, elements. Experts as narrow as these are padded much.
    const double weights = 6.0 * 32 * 3 * 64 * 256;
    EXPECT_GT(static_cast<double>(plan->expert_bytes[0]), weights * c.bits / 8);
    EXPECT_LT(plan->expert_bytes[0], Sum(unquantized->expert_bytes));
    // A host with a little more than that is enough, one with a little less is not.
    const uint64_t needed = plan->memory.needed_bytes;
    ServeOptions options;
    options.kv_cache_tokens = plan->kv_cache_tokens;
    EXPECT_TRUE(model.Plan({1}, needed, options).ok());
    EXPECT_EQ(model.Plan({1}, needed - 1, options).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
}

TEST(PlanHost, EveryWorkerHasItsShare) {
  const Model model(kShipped);
  const auto whole = model.Plan({1});
  const auto cut = model.Plan({3, 1});
  ASSERT_TRUE(whole.ok() && cut.ok()) << whole.status() << cut.status();
  ASSERT_EQ(cut->expert_bytes.size(), 2u);
  EXPECT_NEAR(static_cast<double>(Sum(cut->expert_bytes)),
              static_cast<double>(Sum(whole->expert_bytes)), 64 << 10);
  EXPECT_NEAR(static_cast<double>(cut->expert_bytes[0]),
              0.75 * static_cast<double>(whole->expert_bytes[0]), 64 << 10);
  EXPECT_THAT(cut->memory.ToString(), HasSubstr("links, 2 of"));
}

TEST(PlanHost, ExpertsOfTheGpuWorkerItselfHaveNoLink) {
  const Model model(kShipped);
  const auto plan = model.Plan({});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->expert_bytes, model.Plan({1})->expert_bytes);
  EXPECT_THAT(plan->memory.ToString(), Not(HasSubstr("links")));
}

TEST(PlanHost, MappedExpertsNeedNoMemoryOfTheirOwn) {
  const Model model(kShipped);
  ServeOptions options;
  options.weights = "map";
  const auto plan = model.Plan({1, 1}, kPlenty, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->expert_bytes, (std::vector<uint64_t>{0, 0}));
}

}  // namespace
}  // namespace tandem
