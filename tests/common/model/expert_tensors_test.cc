// Routed experts by (layer, expert, part), their checks, the model hash, and trial QF-5.

#include "common/model/expert_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/model/model_loader.h"
#include "common/model/model_tensors.h"
#include "common/tensor/convert.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

struct Loaded {
  std::unique_ptr<Checkpoint> checkpoint;
  ModelSpec spec;
};

absl::StatusOr<Loaded> Load(const std::string& dir) {
  auto checkpoint = Checkpoint::Open(dir);
  if (!checkpoint.ok()) return checkpoint.status();
  auto spec = LoadModelSpec(**checkpoint);
  if (!spec.ok()) return spec.status();
  return Loaded{*std::move(checkpoint), *std::move(spec)};
}

#define GOLDEN_DIR(name, model)                                          \
  const auto name##_found = testing::SharedPath("golden/models/" model); \
  if (!name##_found) GTEST_SKIP() << "no golden/models/" model;          \
  const std::filesystem::path name = *name##_found

TEST(ExpertTensors, ReadsPartsOfExpertsInBothTypes) {
  GOLDEN_DIR(dir, "mixtral");
  const auto model = Load(dir);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto experts = ExpertTensors::Create(*model->checkpoint, model->spec);
  ASSERT_TRUE(experts.ok()) << experts.status();
  EXPECT_EQ(experts->native_dtype(), DType::kBF16);
  EXPECT_EQ(experts->intermediate(), 16);
  std::vector<float> whole(64 * 16);
  ASSERT_TRUE(
      model->checkpoint->ReadF32("model.layers.1.block_sparse_moe.experts.5.w2.weight", whole)
          .ok());
  std::vector<float> part(10 * 4);
  ASSERT_TRUE(
      experts->Read(1, 5, ExpertPart::kDown, {20, 30}, {12, 16}, DType::kF32, part.data()).ok());
  std::vector<uint16_t> narrow(10 * 4);
  ASSERT_TRUE(
      experts->Read(1, 5, ExpertPart::kDown, {20, 30}, {12, 16}, DType::kBF16, narrow.data()).ok());
  for (int r = 0; r < 10; ++r) {
    for (int c = 0; c < 4; ++c) {
      EXPECT_EQ(part[r * 4 + c], whole[(20 + r) * 16 + 12 + c]);
      EXPECT_EQ(Bf16ToF32(narrow[r * 4 + c]), part[r * 4 + c]);
    }
  }
}

TEST(ExpertTensors, GateAndUpAreToldApart) {
  GOLDEN_DIR(dir, "mixtral");
  const auto model = Load(dir);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto experts = ExpertTensors::Create(*model->checkpoint, model->spec);
  std::vector<float> read(16 * 64), named(16 * 64);
  for (const auto& [part, name] : {std::pair(ExpertPart::kGate, "w1"), {ExpertPart::kUp, "w3"}}) {
    ASSERT_TRUE(experts->Read(0, 7, part, {0, 16}, {0, 64}, DType::kF32, read.data()).ok());
    ASSERT_TRUE(
        model->checkpoint
            ->ReadF32(std::string("model.layers.0.block_sparse_moe.experts.7.") + name + ".weight",
                      named)
            .ok());
    EXPECT_EQ(read, named);
  }
}

TEST(ExpertTensors, RefusesWhatIsNotThere) {
  GOLDEN_DIR(dir, "qwen3_moe");  // layer 1 is dense
  const auto model = Load(dir);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto experts = ExpertTensors::Create(*model->checkpoint, model->spec);
  std::vector<float> out(16 * 64);
  const auto read = [&](int layer, int expert, Range rows, DType dtype) {
    return experts->Read(layer, expert, ExpertPart::kUp, rows, {0, 64}, dtype, out.data());
  };
  EXPECT_TRUE(read(0, 7, {0, 16}, DType::kF32).ok());
  EXPECT_FALSE(read(0, 8, {0, 16}, DType::kF32).ok());
  EXPECT_FALSE(read(0, -1, {0, 16}, DType::kF32).ok());
  EXPECT_FALSE(read(1, 0, {0, 16}, DType::kF32).ok());
  EXPECT_FALSE(read(3, 0, {0, 16}, DType::kF32).ok());
  EXPECT_FALSE(read(0, 0, {8, 24}, DType::kF32).ok());
  EXPECT_FALSE(read(0, 0, {8, 0}, DType::kF32).ok());
  EXPECT_FALSE(read(0, 0, {0, 16}, DType::kF16).ok());
  EXPECT_TRUE(experts->has_layer(2));
  EXPECT_FALSE(experts->has_layer(1));
}

TEST(ExpertTensors, Trial_QF_5_WhatTheFileHoldsDecides) {
  GOLDEN_DIR(dir, "qwen3_moe_fp8");
  const auto original = Load(dir);
  ASSERT_TRUE(original.ok()) << original.status();
  const auto experts = ExpertTensors::Create(*original->checkpoint, original->spec);
  ASSERT_TRUE(experts.ok()) << experts.status();
  EXPECT_EQ(experts->native_dtype(), DType::kF32);
  std::vector<float> want(16 * 64), got(16 * 64);
  ASSERT_TRUE(
      experts->Read(1, 3, ExpertPart::kGate, {0, 16}, {0, 64}, DType::kF32, want.data()).ok());
  const Json config = Json::parse(testing::ReadWholeFile(dir / "config.json"));
  for (int variant = 0; variant < 3; ++variant) {
    testing::TempDir temp;
    temp.CopyFrom(dir);
    Json changed = config;
    Json& quantization = changed["quantization_config"];
    quantization.erase("modules_to_not_convert");
    if (variant == 0) quantization["modules_to_not_convert"] = Json::array();
    if (variant == 1) quantization["modules_to_not_convert"] = {"re:.*gate$", "lm_head"};
    if (variant == 2) quantization["dynamic"] = {{"-:.*mlp.gate.*", Json::object()}};
    temp.Write("config.json", changed.dump());
    const auto model = Load(temp.path());
    ASSERT_TRUE(model.ok()) << variant << ": " << model.status();
    const auto same = ExpertTensors::Create(*model->checkpoint, model->spec);
    ASSERT_TRUE(
        same->Read(1, 3, ExpertPart::kGate, {0, 16}, {0, 64}, DType::kF32, got.data()).ok());
    EXPECT_EQ(got, want);
    const auto router = WeightMatrix::Create(
        *model->checkpoint, model->spec.layers[1].router_weight, 8, 64, model->spec.quant);
    ASSERT_TRUE(router.ok()) << router.status();
    EXPECT_TRUE(IsPlain(router->format()));
  }
}

TEST(ModelTensors, FirstMissingTensorIsNamedWithTheCount) {
  GOLDEN_DIR(dir, "qwen3_moe");
  testing::TempDir temp;
  temp.CopyFrom(dir);
  Json config = Json::parse(testing::ReadWholeFile(dir / "config.json"));
  config["num_experts"] = 10;
  temp.Write("config.json", config.dump());
  const std::string error = Message(Load(temp.path()).status());
  EXPECT_THAT(error,
              HasSubstr("tensor 'model.layers.0.mlp.experts.8.gate_proj.weight' is missing"));
  EXPECT_THAT(error, HasSubstr("(12 of 92 required tensors are)"));
  config["num_experts"] = 8;
  config["intermediate_size"] = 81;
  temp.Write("config.json", config.dump());
  EXPECT_THAT(Message(Load(temp.path()).status()),
              HasSubstr("tensor 'model.layers.1.mlp.gate_proj.weight': shape is [80,64], expected "
                        "[81,64]"));
}

TEST(ModelTensors, HashFollowsConfigAndFilesButNotTheDirectory) {
  GOLDEN_DIR(dir, "qwen3_moe");
  testing::TempDir a, b;
  a.CopyFrom(dir);
  b.CopyFrom(dir);
  const auto stamp = std::filesystem::last_write_time(a.path() / "model.safetensors");
  std::filesystem::last_write_time(b.path() / "model.safetensors", stamp);
  const auto hash = [](const testing::TempDir& temp) {
    const auto model = Load(temp.path());
    EXPECT_TRUE(model.ok()) << model.status();
    return ModelHash(*model->checkpoint, model->spec);
  };
  const uint64_t first = hash(a);
  EXPECT_EQ(first, hash(a));
  EXPECT_EQ(first, hash(b));
  Json config = Json::parse(testing::ReadWholeFile(dir / "config.json"));
  config["norm_topk_prob"] = false;
  b.Write("config.json", config.dump());
  EXPECT_NE(first, hash(b));
  std::filesystem::last_write_time(a.path() / "model.safetensors", stamp + std::chrono::seconds(1));
  EXPECT_NE(first, hash(a));
}

TEST(ModelTensors, StoredBytesAddUpToTheFile) {
  GOLDEN_DIR(dir, "qwen3_moe_fp8");
  const auto model = Load(dir);
  ASSERT_TRUE(model.ok()) << model.status();
  uint64_t bytes = 0;
  for (TensorRole role :
       {TensorRole::kEmbedding, TensorRole::kVector, TensorRole::kLinear, TensorRole::kRouted}) {
    bytes += StoredBytes(*model->checkpoint, model->spec, role);
  }
  const auto& file = *model->checkpoint->files().front();
  EXPECT_EQ(bytes, file.file_bytes() - file.entries().front().begin);
}

}  // namespace
}  // namespace tandem
