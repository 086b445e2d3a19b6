// Rotary tables of real models against golden/ops/rope.safetensors and the figures of the notes.

#include "common/model/rope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

struct GoldenTable {
  const char* name;
  const char* config;  // the hub's config keys
};

constexpr GoldenTable kTables[] = {
    {"llama3_8x",
     R"({"rope_theta":500000.0,"max_position_embeddings":131072,"rope_scaling":{"rope_type":"llama3",
         "factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
         "original_max_position_embeddings":8192}})"},
    {"llama3_32x_d64",
     R"({"rope_theta":500000.0,"max_position_embeddings":131072,"rope_scaling":{"rope_type":"llama3",
         "factor":32.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
         "original_max_position_embeddings":8192}})"},
    {"yarn_deepseek_v3",
     R"({"rope_theta":10000,"max_position_embeddings":163840,"rope_scaling":{"type":"yarn",
         "factor":40,"beta_fast":32,"beta_slow":1,"mscale":1.0,"mscale_all_dim":1.0,
         "original_max_position_embeddings":4096}})"},
    {"yarn_unequal_mscale",
     R"({"rope_theta":10000,"max_position_embeddings":163840,"rope_scaling":{"type":"yarn",
         "factor":40,"beta_fast":32,"beta_slow":1,"mscale":1.0,"mscale_all_dim":0.5,
         "original_max_position_embeddings":4096}})"},
    {"yarn_kimi_k2",
     R"({"rope_theta":50000.0,"max_position_embeddings":131072,"rope_scaling":{"type":"yarn",
         "factor":32.0,"beta_fast":1.0,"beta_slow":1.0,"mscale":1.0,"mscale_all_dim":1.0,
         "original_max_position_embeddings":4096}})"},
    {"yarn_kimi_k2_thinking",
     R"({"rope_theta":50000.0,"max_position_embeddings":262144,"rope_scaling":{"type":"yarn",
         "factor":64.0,"beta_fast":32.0,"beta_slow":1.0,"mscale":1.0,"mscale_all_dim":1.0,
         "original_max_position_embeddings":4096}})"},
    {"yarn_gpt_oss",
     R"({"rope_theta":150000,"max_position_embeddings":131072,"rope_scaling":{"rope_type":"yarn",
         "factor":32.0,"beta_fast":32.0,"beta_slow":1.0,"truncate":false,
         "original_max_position_embeddings":4096}})"},
    {"yarn_qwen3_4x",
     R"({"rope_theta":1000000,"max_position_embeddings":40960,"rope_scaling":{"rope_type":"yarn",
         "factor":4.0,"original_max_position_embeddings":32768}})"},
    {"yarn_deepseek_v4_compressed",
     R"({"max_position_embeddings":1048576,"rope_parameters":{"rope_type":"yarn","rope_theta":160000,
         "factor":16,"beta_fast":32,"beta_slow":1,"attention_factor":1.0,
         "original_max_position_embeddings":65536}})"},
};

RopeConfig ReadConfig(const char* text) {
  const auto json = ParseJsonObject(text, "config.json");
  EXPECT_TRUE(json.ok()) << json.status();
  HubConfig config(*json, "config.json");
  const RopeConfig rope = ReadRopeConfig(config, 10000);
  EXPECT_TRUE(config.status().ok()) << config.status();
  return rope;
}

class GoldenRope : public ::testing::TestWithParam<GoldenTable> {
 protected:
  void SetUp() override {
    const auto path = testing::SharedPath("golden/ops/rope.safetensors");
    if (!path) GTEST_SKIP() << "no golden/ops/rope.safetensors";
    dir_.Write("model.safetensors", testing::ReadWholeFile(*path));
    auto checkpoint = Checkpoint::Open(dir_.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    golden_ = *std::move(checkpoint);
  }

  // Empty when the golden file has no such tensor for this table.
  std::vector<float> Golden(const std::string& field) const {
    const std::string name = std::string(GetParam().name) + "." + field;
    const auto* tensor = golden_->Find(name);
    if (tensor == nullptr) return {};
    std::vector<float> values(tensor->view.Elements());
    EXPECT_TRUE(golden_->ReadF32(name, values).ok());
    return values;
  }

  testing::TempDir dir_;
  std::unique_ptr<Checkpoint> golden_;
};

TEST_P(GoldenRope, TableAndFactorsMatch) {
  const std::vector<float> inv_freq = Golden("inv_freq");
  ASSERT_FALSE(inv_freq.empty());
  const RopeConfig rope = ReadConfig(GetParam().config);
  const RopeTable table = MakeRopeTable(rope, static_cast<int>(inv_freq.size()) * 2);
  ASSERT_EQ(table.inv_freq.size(), inv_freq.size());
  for (size_t j = 0; j < inv_freq.size(); ++j) {
    EXPECT_NEAR(table.inv_freq[j], inv_freq[j], 1e-6 * inv_freq[j]) << j;
  }
  EXPECT_NEAR(table.attention_factor, Golden("cos_sin_factor").at(0), 1e-6);
  const std::vector<float> softmax = Golden("softmax_scale_factor");
  if (!softmax.empty()) {
    EXPECT_NEAR(YarnSoftmaxFactor(rope), softmax[0], 1e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, GoldenRope, ::testing::ValuesIn(kTables),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Rope, FiguresOfTheNotes) {
  EXPECT_NEAR(YarnMscale(40, 1), 1.368888, 1e-6);
  EXPECT_NEAR(YarnMscale(32, 1), 1.346574, 1e-6);
  EXPECT_EQ(YarnMscale(0.5, 1), 1);
  const RopeConfig v3 = ReadConfig(kTables[2].config);
  EXPECT_NEAR(YarnSoftmaxFactor(v3) / std::sqrt(192.0), 0.1352338, 1e-7);
}

TEST(Rope, LinearDividesAndPlainIgnoresOtherKeys) {
  const RopeTable plain = MakeRopeTable(ReadConfig(R"({"rope_theta":100})"), 4);
  EXPECT_THAT(plain.inv_freq, ::testing::ElementsAre(1.0f, 0.1f));
  const RopeTable linear = MakeRopeTable(
      ReadConfig(R"({"rope_theta":100,"rope_scaling":{"type":"linear","factor":2}})"), 4);
  EXPECT_THAT(linear.inv_freq, ::testing::ElementsAre(0.5f, 0.05f));
  const RopeTable named = MakeRopeTable(
      ReadConfig(R"({"rope_parameters":{"rope_type":"default","rope_theta":100}})"), 4);
  EXPECT_EQ(named.inv_freq, plain.inv_freq);
}

TEST(Rope, YarnFactorComesFromTheContextWhereAbsent) {
  const RopeConfig rope = ReadConfig(
      R"({"max_position_embeddings":8192,"rope_scaling":{"type":"yarn",
          "original_max_position_embeddings":2048}})");
  EXPECT_EQ(rope.factor, 4);
  EXPECT_EQ(ContextTokens(rope, 8192), 8192);
}

TEST(Rope, ErrorsNameTheObjectAndKey) {
  const auto json = ParseJsonObject(R"({"rope_scaling":{"type":"linear"}})", "config.json");
  HubConfig config(*json, "config.json");
  ReadRopeConfig(config, 10000);
  EXPECT_EQ(config.status().message(),
            "config.json: rope_scaling: key 'factor': is required and missing");
}

}  // namespace
}  // namespace tandem
