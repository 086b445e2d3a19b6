#include "common/quantize/quantize_checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/tensor/convert.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using testing::RawBytes;
using testing::ReadWholeFile;
using testing::SafetensorsBuilder;
using testing::TempDir;

constexpr int64_t kHidden = 256;
constexpr int64_t kInner = 160;  // no multiple of 128 or 64: down_proj takes smaller groups
const std::string kLayer = "model.layers.0.";

std::vector<uint16_t> Bf16Weights(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<uint16_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(F32ToBf16(normal(random)));
  return values;
}

void AddBf16(SafetensorsBuilder& file, const std::string& name, std::vector<int64_t> shape,
             unsigned seed) {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  file.Add(name, "BF16", shape, RawBytes(Bf16Weights(count, seed)));
}

std::string ExpertName(int expert, const std::string& part) {
  return kLayer + "mlp.experts." + std::to_string(expert) + "." + part + ".weight";
}

// Two shards: attention, router and expert 0 in the first, expert 1 and the head in the second.
void WriteModel(const TempDir& dir) {
  SafetensorsBuilder first, second;
  AddBf16(first, "model.embed_tokens.weight", {64, kHidden}, 1);
  AddBf16(first, kLayer + "input_layernorm.weight", {kHidden}, 2);
  AddBf16(first, kLayer + "self_attn.q_proj.weight", {64, kHidden}, 3);
  AddBf16(first, kLayer + "mlp.gate.weight", {2, kHidden}, 4);
  for (int expert = 0; expert < 2; ++expert) {
    SafetensorsBuilder& file = expert == 0 ? first : second;
    AddBf16(file, ExpertName(expert, "gate_proj"), {kInner, kHidden}, 10 + expert);
    AddBf16(file, ExpertName(expert, "up_proj"), {kInner, kHidden}, 20 + expert);
    AddBf16(file, ExpertName(expert, "down_proj"), {kHidden, kInner}, 30 + expert);
  }
  AddBf16(second, "lm_head.weight", {64, kHidden}, 5);
  dir.Write("model-00001-of-00002.safetensors", first.Build());
  dir.Write("model-00002-of-00002.safetensors", second.Build());
  nlohmann::json map;
  for (const char* name : {"model.embed_tokens.weight"})
    map[name] = "model-00001-of-00002.safetensors";
  for (const std::string& name :
       {kLayer + "input_layernorm.weight", kLayer + "self_attn.q_proj.weight",
        kLayer + "mlp.gate.weight", ExpertName(0, "gate_proj"), ExpertName(0, "up_proj"),
        ExpertName(0, "down_proj")}) {
    map[name] = "model-00001-of-00002.safetensors";
  }
  for (const std::string& name : {std::string("lm_head.weight"), ExpertName(1, "gate_proj"),
                                  ExpertName(1, "up_proj"), ExpertName(1, "down_proj")}) {
    map[name] = "model-00002-of-00002.safetensors";
  }
  dir.Write("model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  dir.Write("config.json", R"({"model_type": "qwen3_moe", "hidden_size": 256})");
  dir.Write("tokenizer.json", "{\"a\": 1}");
  dir.Write("chat_template.jinja", "");
  dir.Write("pytorch_model.bin", "other weights");
}

QuantizeRequest Request(const TempDir& model, const std::string& output) {
  QuantizeRequest request;
  request.model_dir = model.path();
  request.output_dir = output;
  return request;
}

nlohmann::json ConfigOf(const std::string& dir) {
  return nlohmann::json::parse(ReadWholeFile(dir + "/config.json"));
}

std::vector<float> Read(const Checkpoint& checkpoint, const std::string& name, int64_t rows,
                        int64_t cols, const QuantScheme& scheme) {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  const auto matrix = WeightMatrix::Create(checkpoint, name, rows, cols, scheme);
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  if (!matrix.ok()) return values;
  const absl::Status read = matrix->ReadF32({0, rows}, {0, cols}, values);
  EXPECT_TRUE(read.ok()) << read;
  return values;
}

double RelativeError(const std::vector<float>& before, const std::vector<float>& after) {
  double error = 0, square = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    error += (double{before[i]} - after[i]) * (double{before[i]} - after[i]);
    square += double{before[i]} * before[i];
  }
  return std::sqrt(error / square);
}

struct FormatCase {
  const char* name;
  EncodeTarget target;
  std::vector<QuantizedWeights> weights;  // what the reader is told
  double most_loss;
};

class QuantizeFormatTest : public ::testing::TestWithParam<FormatCase> {};

TEST_P(QuantizeFormatTest, OurReaderFindsTheWeightsAgain) {
  TempDir model, parent;
  WriteModel(model);
  const std::string output = parent.path() / "out";
  QuantizeRequest request = Request(model, output);
  request.target = GetParam().target;
  const auto report = QuantizeCheckpoint(request, nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->matrices, 6u);
  EXPECT_LT(report->matrix_bytes_after, report->matrix_bytes_before);

  const auto before = Checkpoint::Open(model.path());
  const auto after = Checkpoint::Open(output);
  ASSERT_TRUE(before.ok() && after.ok()) << after.status();
  QuantScheme scheme;
  scheme.method = QuantMethod::kCompressedTensors;
  scheme.weights = GetParam().weights;
  for (int expert = 0; expert < 2; ++expert) {
    for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
      const bool down = std::string(part) == "down_proj";
      const int64_t rows = down ? kHidden : kInner, cols = down ? kInner : kHidden;
      const std::string name = ExpertName(expert, part);
      EXPECT_LE(RelativeError(Read(**before, name, rows, cols, {}),
                              Read(**after, name, rows, cols, scheme)),
                GetParam().most_loss)
          << name;
    }
  }
  for (const std::string& name : {std::string("lm_head.weight"), kLayer + "mlp.gate.weight",
                                  kLayer + "self_attn.q_proj.weight"}) {
    const auto* const a = (*before)->Find(name);
    const auto* const b = (*after)->Find(name);
    ASSERT_NE(b, nullptr) << name;
    EXPECT_EQ(std::memcmp(a->view.data, b->view.data, a->view.Elements() * 2), 0) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, QuantizeFormatTest,
    ::testing::Values(
        FormatCase{"int8", {WeightFormat::kInt8Bf16, 0, 1}, {{8, 0, true}}, 0.01},
        FormatCase{"int4_g32", {WeightFormat::kInt4Bf16, 32, 1}, {{4, 32, true}}, 0.095},
        FormatCase{
            "int4_g128", {WeightFormat::kInt4Bf16, 128, 1}, {{4, 128, true}, {4, 32, true}}, 0.11},
        FormatCase{"int4_asym_g32", {WeightFormat::kInt4ZeroBf16, 32, 1}, {{4, 32, false}}, 0.09},
        FormatCase{"fp8_channel", {WeightFormat::kFp8, 0, 1}, {{8, 0, true}}, 0.028},
        FormatCase{"fp8_block", {WeightFormat::kFp8, 128, 128}, {{8, 0, true}}, 0.028},
        FormatCase{"mxfp4", {WeightFormat::kMxfp4, 32, 1}, {{4, 32, true}}, 0.12}),
    [](const auto& info) { return info.param.name; });

TEST(QuantizeCheckpoint, ConfigDescribesWhatIsInTheFiles) {
  TempDir model, parent;
  WriteModel(model);
  const std::string output = parent.path() / "out";
  ASSERT_TRUE(QuantizeCheckpoint(Request(model, output), nullptr).ok());
  const auto config = ConfigOf(output);
  EXPECT_EQ(config["hidden_size"], 256);
  const auto& quantization = config["quantization_config"];
  EXPECT_EQ(quantization["quant_method"], "compressed-tensors");
  EXPECT_EQ(quantization["format"], "pack-quantized");
  EXPECT_EQ(quantization["config_groups"].size(), 1u);
  const auto& group = quantization["config_groups"]["group_0"];
  EXPECT_EQ(group["targets"], nlohmann::json({"Linear"}));
  EXPECT_EQ(group["weights"]["num_bits"], 4);
  EXPECT_EQ(group["weights"]["group_size"], 32);
  EXPECT_EQ(group["weights"]["symmetric"], true);
  EXPECT_EQ(quantization["ignore"],
            nlohmann::json({"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate",
                            "model.layers.0.self_attn.q_proj"}));
  const auto index = nlohmann::json::parse(ReadWholeFile(output + "/model.safetensors.index.json"));
  EXPECT_EQ(index["weight_map"][kLayer + "mlp.experts.1.up_proj.weight_packed"],
            "model-00002-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"][kLayer + "mlp.experts.0.up_proj.weight_scale"],
            "model-00001-of-00002.safetensors");
}

TEST(QuantizeCheckpoint, GroupsThatDoNotDivideGetAConfigGroupOfTheirOwn) {
  TempDir model, parent;
  WriteModel(model);
  const std::string output = parent.path() / "out";
  QuantizeRequest request = Request(model, output);
  request.target.group_columns = 128;
  ASSERT_TRUE(QuantizeCheckpoint(request, nullptr).ok());
  const auto groups = ConfigOf(output)["quantization_config"]["config_groups"];
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups["group_0"]["weights"]["group_size"], 128);
  EXPECT_EQ(groups["group_0"]["targets"],
            nlohmann::json({"re:.*\\.gate_proj$", "re:.*\\.up_proj$"}));
  EXPECT_EQ(groups["group_1"]["weights"]["group_size"], 32);
  EXPECT_EQ(groups["group_1"]["targets"], nlohmann::json({"re:.*\\.down_proj$"}));
}

TEST(QuantizeCheckpoint, RowsShorterThanTheGroupAreReadBackBesideLongerOnes) {
  // 64 columns take groups of 64: for the reader one scale a row, as groups of 128 would be.
  TempDir model, parent;
  SafetensorsBuilder file;
  AddBf16(file, ExpertName(0, "up_proj"), {64, 256}, 1);
  AddBf16(file, ExpertName(0, "down_proj"), {256, 64}, 2);
  model.Write("model.safetensors", file.Build());
  model.Write("config.json", "{}");
  const std::string output = parent.path() / "out";
  QuantizeRequest request = Request(model, output);
  request.target.group_columns = 128;
  ASSERT_TRUE(QuantizeCheckpoint(request, nullptr).ok());
  EXPECT_EQ(ConfigOf(output)["quantization_config"]["config_groups"].size(), 2u);
  const auto before = Checkpoint::Open(model.path());
  const auto after = Checkpoint::Open(output);
  ASSERT_TRUE(before.ok() && after.ok());
  QuantScheme scheme;
  scheme.method = QuantMethod::kCompressedTensors;
  scheme.weights = {{4, 128, true}, {4, 64, true}};
  for (const auto& [part, rows, cols] : {std::tuple("up_proj", 64, 256), {"down_proj", 256, 64}}) {
    const std::string name = ExpertName(0, part);
    EXPECT_LE(RelativeError(Read(**before, name, rows, cols, {}),
                            Read(**after, name, rows, cols, scheme)),
              0.11)
        << name;
  }
}

TEST(QuantizeCheckpoint, ScopeOfLinearsTakesAttentionButNotTheRouter) {
  TempDir model, parent;
  WriteModel(model);
  const std::string output = parent.path() / "out";
  QuantizeRequest request = Request(model, output);
  request.scope = QuantizeScope::kLinears;
  const auto report = QuantizeCheckpoint(request, nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->matrices, 7u);
  const auto after = Checkpoint::Open(output);
  ASSERT_TRUE(after.ok());
  EXPECT_NE((*after)->Find(kLayer + "self_attn.q_proj.weight_packed"), nullptr);
  EXPECT_NE((*after)->Find(kLayer + "mlp.gate.weight"), nullptr);
  EXPECT_NE((*after)->Find("model.embed_tokens.weight"), nullptr);
}

TEST(QuantizeCheckpoint, CopiesTheOtherFilesButNoOtherWeights) {
  TempDir model, parent;
  WriteModel(model);
  std::filesystem::permissions(model.path() / "tokenizer.json", std::filesystem::perms::owner_read);
  const std::string output = parent.path() / "out";
  ASSERT_TRUE(QuantizeCheckpoint(Request(model, output), nullptr).ok());
  EXPECT_EQ(ReadWholeFile(output + "/tokenizer.json"), "{\"a\": 1}");
  EXPECT_TRUE(std::filesystem::exists(output + "/chat_template.jinja"));
  EXPECT_FALSE(std::filesystem::exists(output + "/pytorch_model.bin"));
}

TEST(QuantizeCheckpoint, Fp8SourceIsDecodedAndItsScalesAreGone) {
  TempDir model, parent;
  const std::string expert = ExpertName(0, "up_proj"), other = kLayer + "self_attn.q_proj.weight";
  std::vector<uint8_t> codes;
  for (int i = 0; i < 64 * 160; ++i) codes.push_back(static_cast<uint8_t>(i % 0x7e));
  const std::vector<float> scales = {0.5f, 0.25f};
  SafetensorsBuilder file;
  for (const std::string& name : {expert, other}) {
    file.Add(name, "F8_E4M3", {64, 160}, RawBytes(codes));
    file.Add(name + "_scale_inv", "F32", {1, 2}, RawBytes(scales));
  }
  model.Write("model.safetensors", file.Build());
  model.Write("config.json", R"({"quantization_config":
      {"quant_method": "fp8", "weight_block_size": [128, 128]}})");
  const std::string output = parent.path() / "out";
  const auto report = QuantizeCheckpoint(Request(model, output), nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  const auto after = Checkpoint::Open(output);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ((*after)->tensor_count(), 4u);  // packed, scale, shape; the other
  const auto* const plain = (*after)->Find(other);
  ASSERT_NE(plain, nullptr);
  EXPECT_EQ(plain->view.dtype, DType::kBF16);
  const auto values = Read(**after, other, 64, 160, {});
  EXPECT_EQ(values[160 + 3], 0.5f * kE4m3ToF32[codes[160 + 3]]);
  EXPECT_EQ(values[160 + 130], 0.25f * kE4m3ToF32[codes[160 + 130]]);
  EXPECT_LT(report->loss.Relative(), 0.2);
}

std::string Refusal(const QuantizeRequest& request) {
  const auto report = QuantizeCheckpoint(request, nullptr);
  EXPECT_FALSE(report.ok());
  return std::string(report.status().message());
}

size_t EntriesIn(const std::filesystem::path& dir) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(dir),
                                           std::filesystem::directory_iterator()));
}

TEST(QuantizeCheckpointRefusals, NanWeightIsNamedAndNothingIsLeft) {
  TempDir model, parent;
  std::vector<float> values(64 * 64, 0.5f);
  values[130] = std::numeric_limits<float>::quiet_NaN();
  SafetensorsBuilder file;
  file.Add(ExpertName(0, "up_proj"), "F32", {64, 64}, RawBytes(values));
  model.Write("model.safetensors", file.Build());
  model.Write("config.json", "{}");
  const std::string what = Refusal(Request(model, parent.path() / "out"));
  EXPECT_NE(what.find("experts.0.up_proj"), std::string::npos) << what;
  EXPECT_NE(what.find("[2,2]"), std::string::npos) << what;
  EXPECT_EQ(EntriesIn(parent.path()), 0u);
}

TEST(QuantizeCheckpointRefusals, ExistingOutputIsKeptUnlessOverwritten) {
  TempDir model, parent;
  WriteModel(model);
  const std::string output = parent.path() / "out";
  std::filesystem::create_directory(output);
  parent.Write("out/precious.txt", "mine");
  QuantizeRequest request = Request(model, output);
  EXPECT_NE(Refusal(request).find("exists"), std::string::npos);
  request.overwrite = true;
  EXPECT_NE(Refusal(request).find("not a model directory"), std::string::npos);
  EXPECT_EQ(ReadWholeFile(output + "/precious.txt"), "mine");
  parent.Write("out/config.json", "{}");
  ASSERT_TRUE(QuantizeCheckpoint(request, nullptr).ok());
  EXPECT_FALSE(std::filesystem::exists(output + "/precious.txt"));
  EXPECT_EQ(EntriesIn(parent.path()), 1u);
}

TEST(QuantizeCheckpointRefusals, OutputInsideTheModelIsRefused) {
  TempDir model;
  WriteModel(model);
  for (const auto& output : {model.path(), model.path() / "out", model.path() / "." / "a" / ".."}) {
    QuantizeRequest request = Request(model, output);
    request.overwrite = true;
    EXPECT_NE(Refusal(request).find("inside"), std::string::npos) << output;
  }
}

TEST(QuantizeCheckpointRefusals, CancelledRunLeavesTheOlderOutput) {
  TempDir model, parent;
  WriteModel(model);
  parent.Write("out/config.json", "old");
  QuantizeRequest request = Request(model, parent.path() / "out");
  request.overwrite = true;
  int calls = 0;
  const auto report = QuantizeCheckpoint(request, [&](uint64_t done, uint64_t total) {
    EXPECT_LE(done, total);
    return ++calls < 3;
  });
  EXPECT_EQ(report.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(ReadWholeFile(parent.path() / "out/config.json"), "old");
  EXPECT_EQ(EntriesIn(parent.path()), 1u);
}

TEST(QuantizeCheckpointRefusals, SourcesThatCannotBeQuantizedAreNamed) {
  TempDir parent;
  const std::string output = parent.path() / "out";
  const auto refused = [&](const std::string& name, const std::string& dtype,
                           const std::vector<int64_t>& shape, const std::string& config) {
    TempDir model;
    int64_t bytes = dtype == "BF16" ? 2 : 1;
    for (const int64_t dim : shape) bytes *= dim;
    model.Write("model.safetensors",
                SafetensorsBuilder().Add(name, dtype, shape, std::string(bytes, '\0')).Build());
    model.Write("config.json", config);
    return Refusal(Request(model, output));
  };
  EXPECT_NE(refused(kLayer + "mlp.experts.gate_up_proj", "BF16", {2, 64, 32}, "{}")
                .find("all experts of a layer"),
            std::string::npos);
  EXPECT_NE(refused(ExpertName(0, "up_proj"), "BF16", {8, 40}, "{}").find("groups of 32"),
            std::string::npos);
  EXPECT_NE(
      refused(kLayer + "self_attn.q_proj.weight", "BF16", {8, 64}, "{}").find("--scope linears"),
      std::string::npos);
  EXPECT_NE(refused(ExpertName(0, "up_proj"), "BF16", {8, 64},
                    R"({"quantization_config": {"quant_method": "awq"}})")
                .find("awq"),
            std::string::npos);
  EXPECT_NE(refused(ExpertName(0, "up_proj"), "BF16", {8, 64}, "[]").find("config.json"),
            std::string::npos);
  EXPECT_NE(refused(ExpertName(0, "up_proj"), "F8_E4M3", {8, 64}, "{}").find("scale"),
            std::string::npos);
  EXPECT_EQ(EntriesIn(parent.path()), 0u);
}

TEST(QuantizePlan, ExpertsAndLinearsAreFoundByName) {
  for (const char* name : {"model.layers.3.mlp.experts.17.down_proj.weight",
                           "model.layers.3.block_sparse_moe.experts.0.w1.weight"}) {
    EXPECT_TRUE(IsRoutedExpertWeight(name)) << name;
    EXPECT_TRUE(IsLayerLinearWeight(name)) << name;
  }
  for (const char* name :
       {"model.layers.3.mlp.shared_experts.down_proj.weight",
        "model.layers.3.mlp.experts.w1.weight", "model.layers.3.mlp.experts.1.weight",
        "model.layers.3.mlp.experts.1.w1.bias", "model.layers.3.mlp.experts..w1.weight"}) {
    EXPECT_FALSE(IsRoutedExpertWeight(name)) << name;
  }
  for (const char* name :
       {"model.layers.3.mlp.gate.weight", "model.embed_tokens.weight",
        "model.layers.61.embed_tokens.weight", "lm_head.weight",
        "model.layers.61.shared_head.head.weight", "model.layers.0.self_attn.q_proj.bias"}) {
    EXPECT_FALSE(IsLayerLinearWeight(name)) << name;
  }
}

}  // namespace
}  // namespace tandem
