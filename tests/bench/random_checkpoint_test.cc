// Random checkpoints of golden configs: loadable, of the stated deviation, the same from one seed.

#include "tests/bench/random_checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "common/model/expert_tensors.h"
#include "common/model/model_loader.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::bench {
namespace {

struct Case {
  const char* name;
  const char* model;
  std::optional<EncodeTarget> experts;
};

// gtest prints parameters by their bytes otherwise.
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class RandomCheckpoint : public ::testing::TestWithParam<Case> {};

double Deviation(const std::vector<float>& values) {
  double squares = 0;
  for (float v : values) squares += double{v} * v;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

TEST_P(RandomCheckpoint, LoadsWithTheStatedDeviation) {
  const auto config =
      testing::SharedPath(std::string("golden/models/") + GetParam().model + "/config.json");
  if (!config) GTEST_SKIP() << "no golden/models/" << GetParam().model;
  const testing::TempDir dir;
  nlohmann::json widened = nlohmann::json::parse(testing::ReadWholeFile(*config));
  // Wide enough for groups of 32.
  if (widened.contains("moe_intermediate_size")) widened["moe_intermediate_size"] = 64;
  RandomCheckpointRequest request;
  request.config_file = dir.Write("config.json", widened.dump());
  request.output_dir = dir.path() / "model";
  request.experts = GetParam().experts;
  request.max_file_bytes = 20'000;
  const auto report = WriteRandomCheckpoint(request);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->files, 1);

  const auto checkpoint = Checkpoint::Open(request.output_dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto spec = LoadModelSpec(**checkpoint);
  ASSERT_TRUE(spec.ok()) << spec.status();
  const auto experts = ExpertTensors::Create(**checkpoint, *spec);
  ASSERT_TRUE(experts.ok()) << experts.status();
  int layer = 0;
  while (!experts->has_layer(layer)) ++layer;
  std::vector<float> up(static_cast<size_t>(experts->intermediate() * experts->hidden()));
  const absl::Status read = experts->Read(layer, 0, ExpertPart::kUp, {0, experts->intermediate()},
                                          {0, experts->hidden()}, DType::kF32, up.data());
  ASSERT_TRUE(read.ok()) << read;
  // E8M0 scales are powers of two: within a factor of sqrt(2).
  const double wanted = 1 / std::sqrt(static_cast<double>(experts->hidden()));
  EXPECT_GT(Deviation(up), 0.65 * wanted);
  EXPECT_LT(Deviation(up), 1.5 * wanted);
}

INSTANTIATE_TEST_SUITE_P(
    Formats, RandomCheckpoint,
    ::testing::Values(Case{"plain", "qwen3_moe", std::nullopt},
                      Case{"latent_attention", "deepseek_v3", std::nullopt},
                      Case{"int4", "qwen3_moe", EncodeTarget{WeightFormat::kInt4Bf16, 32, 1}},
                      Case{"int4_zero", "qwen3_moe",
                           EncodeTarget{WeightFormat::kInt4ZeroBf16, 32, 1}},
                      Case{"int8", "qwen3_moe", EncodeTarget{WeightFormat::kInt8Bf16, 0, 1}},
                      Case{"fp8", "mixtral", EncodeTarget{WeightFormat::kFp8, 128, 128}},
                      Case{"mxfp4", "qwen3_moe", EncodeTarget{WeightFormat::kMxfp4, 32, 1}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(RandomCheckpoint, SeedDecidesEveryByte) {
  const auto config = testing::SharedPath("golden/models/qwen3_moe/config.json");
  if (!config) GTEST_SKIP() << "no golden/models/qwen3_moe";
  const testing::TempDir dir;
  std::vector<std::string> bytes;
  for (const uint64_t seed : {5u, 5u, 6u}) {
    RandomCheckpointRequest request;
    request.config_file = *config;
    request.output_dir = dir.path() / std::to_string(bytes.size());
    request.seed = seed;
    const auto report = WriteRandomCheckpoint(request);
    ASSERT_TRUE(report.ok()) << report.status();
    bytes.push_back(
        testing::ReadWholeFile(dir.path() / std::to_string(bytes.size()) / "model.safetensors"));
  }
  EXPECT_EQ(bytes[0], bytes[1]);
  EXPECT_NE(bytes[0], bytes[2]);
}

TEST(RandomCheckpoint, RefusesGroupsThatDoNotFit) {
  const auto config = testing::SharedPath("golden/models/qwen3_moe/config.json");
  if (!config) GTEST_SKIP() << "no golden/models/qwen3_moe";
  const testing::TempDir dir;
  RandomCheckpointRequest request;
  request.config_file = *config;
  request.output_dir = dir.path() / "model";
  request.experts = EncodeTarget{WeightFormat::kInt4Bf16, 7, 1};
  EXPECT_EQ(WriteRandomCheckpoint(request).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem::bench
