// quantization_config of every method, where it may lie, and what is refused by name.

#include "common/model/quant_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

// The scheme of a config.json with that quantization_config.
absl::StatusOr<QuantScheme> Read(Json quantization) {
  const Json root = {{"quantization_config", std::move(quantization)}};
  HubConfig config(root, "config.json");
  QuantScheme scheme = ReadQuantScheme(config);
  if (!config.status().ok()) return config.status();
  return scheme;
}

std::string Error(const Json& quantization) {
  return std::string(Read(quantization).status().message());
}

Json CompressedTensors(const Json& weights, const char* format = "pack-quantized") {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}}}}}};
}

TEST(QuantConfig, AbsentIsNone) {
  const Json root = {{"hidden_size", 64}, {"quantization_config", nullptr}};
  HubConfig config(root, "config.json");
  EXPECT_EQ(ReadQuantScheme(config).method, QuantMethod::kNone);
  EXPECT_TRUE(config.status().ok());
}

TEST(QuantConfig, IsFoundWhereWritersPutIt) {
  const Json fp8 = {{"quant_method", "fp8"}, {"weight_block_size", {64, 32}}};
  for (const Json& root : {Json{{"quantization_config", fp8}}, Json{{"compression_config", fp8}},
                           Json{{"text_config", {{"quantization_config", fp8}}}}}) {
    HubConfig config(root, "config.json");
    const QuantScheme scheme = ReadQuantScheme(config);
    ASSERT_TRUE(config.status().ok()) << config.status();
    EXPECT_EQ(scheme.method, QuantMethod::kFp8);
    EXPECT_EQ(scheme.block.rows, 64);
    EXPECT_EQ(scheme.block.cols, 32);
  }
}

TEST(QuantConfig, NestedConfigsAreLookedIntoOnce) {
  constexpr int kDepth = 200'000;
  std::string text;
  for (int i = 0; i < kDepth; ++i) text += R"({"text_config":)";
  text += "1" + std::string(kDepth, '}');
  const auto root = ParseJsonObject(text, "config.json");
  ASSERT_TRUE(root.ok()) << root.status();
  HubConfig config(*root, "config.json");
  EXPECT_EQ(ReadQuantScheme(config).method, QuantMethod::kNone);
  EXPECT_TRUE(config.status().ok()) << config.status();
}

TEST(QuantConfig, MethodsWithoutParameters) {
  EXPECT_EQ(Read({{"quant_method", "mxfp4"}})->method, QuantMethod::kMxfp4);
  EXPECT_EQ(Read({{"quant_method", "mxfp8"}})->method, QuantMethod::kMxfp8);
  EXPECT_EQ(Read({{"quant_method", "fbgemm_fp8"}})->method, QuantMethod::kFp8);
  EXPECT_EQ(Read({{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}})->method,
            QuantMethod::kModelOpt);
  EXPECT_THAT(Error({{"quant_method", "modelopt"}, {"quant_algo", "W4A8_AWQ"}}),
              HasSubstr("key 'quant_algo': is 'W4A8_AWQ', supported are NVFP4"));
  EXPECT_THAT(Error({{"quant_method", "bitsandbytes"}}),
              HasSubstr("quantization_config: key 'quant_method': is 'bitsandbytes'"));
  EXPECT_THAT(Error({{"quant_method", "fp8"}, {"fmt", "e5m2"}}), HasSubstr("'e5m2'"));
}

TEST(QuantConfig, ModelOptHasAFileOfItsOwn) {
  const Json root = {{"producer", {{"name", "modelopt"}}},
                     {"quantization", {{"quant_algo", "NVFP4"}, {"group_size", 16}}}};
  const auto scheme = ReadModelOptScheme(root, "hf_quant_config.json");
  ASSERT_TRUE(scheme.ok()) << scheme.status();
  EXPECT_EQ(scheme->method, QuantMethod::kModelOpt);
  const Json other = {{"quantization", {{"quant_algo", "INT8_SQ"}}}};
  EXPECT_THAT(std::string(ReadModelOptScheme(other, "hf_quant_config.json").status().message()),
              HasSubstr("hf_quant_config.json: quantization: key 'quant_algo': is 'INT8_SQ'"));
}

TEST(QuantConfig, CompressedTensorsGroups) {
  const auto int4 = Read(CompressedTensors({{"num_bits", 4},
                                            {"type", "int"},
                                            {"strategy", "group"},
                                            {"group_size", 32},
                                            {"symmetric", false}}));
  ASSERT_TRUE(int4.ok()) << int4.status();
  EXPECT_EQ(int4->method, QuantMethod::kCompressedTensors);
  ASSERT_EQ(int4->weights.size(), 1u);
  EXPECT_EQ(int4->weights[0].bits, 4);
  EXPECT_EQ(int4->weights[0].group_columns, 32);
  EXPECT_FALSE(int4->weights[0].symmetric);
  const auto channel = Read(CompressedTensors(
      {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}, {"group_size", nullptr}},
      "int-quantized"));
  ASSERT_TRUE(channel.ok()) << channel.status();
  EXPECT_EQ(channel->weights.at(0).group_columns, 0);
  const auto block = Read(CompressedTensors(
      {{"num_bits", 8}, {"type", "float"}, {"strategy", "block"}, {"block_structure", {64, 128}}},
      "float-quantized"));
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_TRUE(block->weights.empty());
  EXPECT_EQ(block->block.rows, 64);
}

TEST(QuantConfig, CompressedTensorsRefusals) {
  EXPECT_THAT(Error(CompressedTensors({{"num_bits", 4}}, "marlin-24")), HasSubstr("'marlin-24'"));
  EXPECT_THAT(Error(CompressedTensors({{"num_bits", 4}, {"strategy", "token"}})),
              HasSubstr("config_groups: 'group_0': weights: key 'strategy': is 'token'"));
  EXPECT_THAT(Error(CompressedTensors({{"strategy", "group"}})), HasSubstr("'num_bits'"));
  Json sparse = CompressedTensors({{"num_bits", 4}});
  sparse["sparsity_config"] = {{"format", "sparse-24-bitmask"}};
  EXPECT_THAT(Error(sparse), HasSubstr("sparsity_config: key 'format': is 'sparse-24-bitmask'"));
  Json broken = CompressedTensors(Json::object());
  broken["config_groups"] = {{"group_0", 5}};
  EXPECT_THAT(Error(broken), HasSubstr("'group_0' is not an object"));
}

TEST(QuantConfig, Awq) {
  const Json awq = {{"quant_method", "awq"},
                    {"bits", 4},
                    {"group_size", 128},
                    {"zero_point", true},
                    {"version", "gemm"}};
  const auto scheme = Read(awq);
  ASSERT_TRUE(scheme.ok()) << scheme.status();
  EXPECT_EQ(scheme->method, QuantMethod::kAwq);
  EXPECT_EQ(scheme->weights.at(0).group_columns, 128);
  Json other = awq;
  other["version"] = "gemv";
  EXPECT_THAT(Error(other), HasSubstr("key 'version': is 'gemv'"));
  other = awq;
  other["zero_point"] = false;
  EXPECT_THAT(Error(other), HasSubstr("key 'zero_point'"));
  EXPECT_THAT(Error({{"quant_method", "awq"}}), HasSubstr("key 'bits': is required"));
}

TEST(QuantConfig, Gptq) {
  Json gptq = {{"quant_method", "gptq"}, {"bits", 8}, {"group_size", -1}, {"sym", false}};
  auto scheme = Read(gptq);
  ASSERT_TRUE(scheme.ok()) << scheme.status();
  EXPECT_EQ(scheme->weights.at(0).bits, 8);
  EXPECT_EQ(scheme->weights.at(0).group_columns, 0);
  EXPECT_FALSE(scheme->weights.at(0).symmetric);
  EXPECT_TRUE(scheme->zero_minus_one);
  gptq["checkpoint_format"] = "gptq_v2";
  EXPECT_FALSE(Read(gptq)->zero_minus_one);
  gptq["checkpoint_format"] = "marlin";
  EXPECT_THAT(Error(gptq), HasSubstr("key 'checkpoint_format': is 'marlin'"));
  gptq["checkpoint_format"] = "gptq";
  gptq["dynamic"] = {{"-:.*mlp.gate.*", Json::object()}};
  EXPECT_TRUE(Read(gptq).ok());
  gptq["dynamic"]["+:.*down.*"] = {{"bits", 4}};
  EXPECT_THAT(Error(gptq), HasSubstr("key 'dynamic': quantizes '+:.*down.*'"));
}

}  // namespace
}  // namespace tandem
