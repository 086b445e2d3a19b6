// Every supported family's golden config: spec, tensors present with the right shapes, trials CK-1,
// CK-5, CK-7 and CK-13 at the level of the spec.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "common/checkpoint/checkpoint.h"
#include "common/model/model_loader.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::optional<Json> GoldenConfig(const std::string& model) {
  const auto path = testing::SharedPath("golden/models/" + model + "/config.json");
  if (!path) return std::nullopt;
  return Json::parse(testing::ReadWholeFile(*path));
}

absl::StatusOr<ModelSpec> Parse(const Json& config) {
  return ParseModelSpec(config.dump(), {.file = "config.json"});
}

#define GOLDEN_CONFIG(name, model)                                 \
  auto name##_found = GoldenConfig(model);                         \
  if (!name##_found) GTEST_SKIP() << "no golden/models/" << model; \
  Json name = *name##_found

class GoldenModel : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenModel, LoadsWithEveryTensorInPlace) {
  const auto dir = testing::SharedPath(std::string("golden/models/") + GetParam());
  if (!dir) GTEST_SKIP() << "no golden/models/" << GetParam();
  const auto checkpoint = Checkpoint::Open(*dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto spec = LoadModelSpec(**checkpoint);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->vocab, 256);
  EXPECT_THAT(spec->end_ids, ElementsAre(1u));
  EXPECT_EQ(spec->norm_eps, 1e-5f);
  EXPECT_EQ(spec->rope.inv_freq.size(), static_cast<size_t>(spec->rope.rotary_dims) / 2);
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenModel,
                         ::testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral",
                                           "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k2_int4",
                                           "qwen3_moe_fp8"),
                         [](const auto& info) { return std::string(info.param); });

TEST(ModelSpec, ShippedModelLoads) {
  const auto dir = testing::SharedPath("models/tandem-tiny");
  if (!dir) GTEST_SKIP() << "no models/tandem-tiny";
  const auto checkpoint = Checkpoint::Open(*dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto spec = LoadModelSpec(**checkpoint);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->layers.size(), 6u);
  EXPECT_EQ(spec->moe.experts, 32);
  EXPECT_THAT(spec->end_ids, ElementsAre(1015u, 1017u));  // the union with generation_config.json
}

TEST(ModelSpec, Qwen3MoeMixesDenseAndMoeLayers) {
  GOLDEN_CONFIG(config, "qwen3_moe");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(spec->layers.size(), 3u);
  EXPECT_TRUE(spec->layers[0].moe);
  EXPECT_FALSE(spec->layers[1].moe);
  EXPECT_EQ(spec->layers[1].dense_intermediate, 80);
  EXPECT_EQ(spec->layers[2].expert_down, "model.layers.2.mlp.experts.%d.down_proj.weight");
  EXPECT_EQ(spec->layers[2].router_weight, "model.layers.2.mlp.gate.weight");
  EXPECT_EQ(spec->layers[0].attention.q_norm, "model.layers.0.self_attn.q_norm.weight");
  EXPECT_EQ(spec->attention.head_dim, 24);
  EXPECT_EQ(spec->attention.kv_heads, 2);
  EXPECT_EQ(spec->moe.top_k, 3);
  EXPECT_TRUE(spec->moe.router.renormalize);
  EXPECT_EQ(spec->moe.router.score, RouterScore::kSoftmax);
  EXPECT_EQ(spec->moe.shared_intermediate, 0);
}

TEST(ModelSpec, DeepseekV3IsLatentAttentionWithGroupedSigmoidRouter) {
  GOLDEN_CONFIG(config, "deepseek_v3");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->attention.kind, AttentionKind::kMla);
  EXPECT_EQ(spec->attention.q_lora_rank, 40);
  EXPECT_EQ(spec->attention.kv_lora_rank, 32);
  EXPECT_EQ(spec->attention.latent_eps, 1e-6f);  // while rms_norm_eps is 1e-5
  EXPECT_EQ(spec->rope.layout, RopeLayout::kInterleaved);
  EXPECT_EQ(spec->rope.attention_factor, 1.0f);
  // 24^-1/2 * (0.1 ln 4 + 1)^2
  EXPECT_NEAR(spec->attention.softmax_scale, 0.20412415 * 1.13862944 * 1.13862944, 1e-7);
  EXPECT_EQ(spec->moe.router.score, RouterScore::kSigmoid);
  EXPECT_TRUE(spec->moe.router.selection_bias);
  EXPECT_EQ(spec->moe.router.groups, 4);
  EXPECT_EQ(spec->moe.router.groups_kept, 2);
  EXPECT_FALSE(spec->moe.router.group_score_max);
  EXPECT_EQ(spec->moe.router.factor, 2.5f);
  EXPECT_EQ(spec->moe.router.renormalize_eps, 1e-20f);
  EXPECT_EQ(spec->moe.shared_intermediate, 16);
  EXPECT_FALSE(spec->layers[0].moe);
  EXPECT_TRUE(spec->layers[1].moe);
  EXPECT_EQ(spec->layers[1].router_bias, "model.layers.1.mlp.gate.e_score_correction_bias");
}

TEST(ModelSpec, DeepseekV2HasPlainQueriesAndTwoSharedExperts) {
  GOLDEN_CONFIG(config, "deepseek_v2");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->attention.q_lora_rank, 0);
  EXPECT_EQ(spec->layers[0].attention.q.weight, "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(spec->moe.shared_intermediate, 32);
  EXPECT_TRUE(spec->moe.router.group_score_max);
  EXPECT_FALSE(spec->moe.router.renormalize);
  EXPECT_FALSE(spec->moe.router.selection_bias);
}

TEST(ModelSpec, MixtralNamesItsExpertsByNumber) {
  GOLDEN_CONFIG(config, "mixtral");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->layers[0].expert_up, "model.layers.0.block_sparse_moe.experts.%d.w3.weight");
  EXPECT_EQ(spec->attention.window_tokens, 0);
  config["sliding_window"] = 128;
  EXPECT_EQ(Parse(config)->attention.window_tokens, 128);
}

TEST(ModelSpec, Qwen2HasBiasesOnQueriesKeysAndValuesOnly) {
  GOLDEN_CONFIG(config, "qwen2");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->layers[2].attention.k.bias, "model.layers.2.self_attn.k_proj.bias");
  EXPECT_EQ(spec->layers[2].attention.o.bias, "");
  EXPECT_FALSE(spec->attention.qk_norm);
  EXPECT_EQ(spec->attention.head_dim, 16);  // absent: hidden / heads
}

TEST(ModelSpec, NullMeansAbsent) {
  GOLDEN_CONFIG(config, "llama");
  for (const char* key : {"head_dim", "attention_bias", "mlp_bias", "hidden_act"}) {
    config[key] = nullptr;
  }
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->attention.head_dim, 16);
  config["rope_scaling"] = nullptr;
  EXPECT_FLOAT_EQ(Parse(config)->rope.inv_freq[1], 1 / std::pow(500000.0, 2.0 / 16));
  config["hidden_size"] = nullptr;
  EXPECT_THAT(Message(Parse(config).status()),
              HasSubstr("config.json: key 'hidden_size': is required and missing"));
}

struct BadValue {
  const char* model;
  const char* key;
  Json value;
  const char* message;  // what the error says beside file and key
};

TEST(ModelSpec, RefusesValuesThatCannotBe) {
  const BadValue cases[] = {
      {"llama", "hidden_size", 0, "expected an integer from 1"},
      {"llama", "hidden_size", -64, "expected an integer from 1"},
      {"llama", "hidden_size", 1e18, "expected an integer from 1"},
      {"llama", "hidden_size", "64", "expected an integer"},
      {"llama", "hidden_size", 64.5, "expected an integer"},
      {"llama", "num_key_value_heads", 3, "does not divide"},
      {"llama", "head_dim", 15, "odd"},
      {"llama", "num_hidden_layers", 100000, "expected an integer from 1 to 1024"},
      {"llama", "hidden_act", "gelu", "only silu"},
      {"llama", "rms_norm_eps", 0, "expected a number above 0"},
      {"llama", "rope_theta", -1, "expected a number above 0"},
      {"llama", "attention_bias", 1, "expected true or false"},
      {"llama", "eos_token_id", -1, "expected integers from 0"},
      {"qwen3_moe", "num_experts", 0xFFFF, "to 65534"},
      {"qwen3_moe", "num_experts_per_tok", 9, "above the 8 experts"},
      {"deepseek_v3", "n_group", 3, "does not divide"},
      {"deepseek_v3", "topk_group", 5, "above n_group"},
      {"deepseek_v3", "scoring_func", "softmax", "only 'sigmoid'"},
      {"deepseek_v2", "norm_topk_prob", true, "no deepseek_v2 release"},
      {"deepseek_v2", "topk_method", "noaux_tc", "supported are greedy"},
  };
  for (const BadValue& bad : cases) {
    GOLDEN_CONFIG(config, bad.model);
    config[bad.key] = bad.value;
    const auto spec = Parse(config);
    ASSERT_FALSE(spec.ok()) << bad.model << " " << bad.key << " " << bad.value;
    EXPECT_THAT(Message(spec.status()), HasSubstr("config.json"));
    EXPECT_THAT(Message(spec.status()), HasSubstr(bad.key));
    EXPECT_THAT(Message(spec.status()), HasSubstr(bad.message));
  }
}

TEST(ModelSpec, UnknownArchitectureListsTheSupportedOnes) {
  const auto spec = Parse(Json{{"model_type", "gpt2"}, {"architectures", {"GPT2LMHeadModel"}}});
  EXPECT_THAT(Message(spec.status()), HasSubstr("'gpt2'"));
  EXPECT_THAT(Message(spec.status()), HasSubstr("GPT2LMHeadModel"));
  EXPECT_THAT(Message(spec.status()), HasSubstr("llama, qwen2, qwen3, qwen3_moe, mixtral"));
  EXPECT_THAT(Message(spec.status()), HasSubstr("kimi_k2"));
}

TEST(ModelSpec, UnsupportedQuantizationIsNamed) {
  GOLDEN_CONFIG(config, "qwen3_moe");
  config["quantization_config"] = {{"quant_method", "bitsandbytes"}};
  EXPECT_THAT(Message(Parse(config).status()), HasSubstr("'bitsandbytes', supported are fp8"));
  config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 64}}};
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->quant.block.rows, 128);
  EXPECT_EQ(spec->quant.block.cols, 64);
  config["quantization_config"]["weight_block_size"] = {128};
  EXPECT_THAT(Message(Parse(config).status()), HasSubstr("weight_block_size"));
}

TEST(ModelSpec, BrokenJsonNamesTheFile) {
  for (const char* text : {"", "{", "[]", "{\"model_type\": 5}", "nul"}) {
    const auto spec = ParseModelSpec(text, {.file = "dir/config.json"});
    ASSERT_FALSE(spec.ok()) << text;
    EXPECT_THAT(Message(spec.status()), HasSubstr("dir/config.json"));
  }
}

TEST(ModelSpec, DeepNestingIsAnErrorAndNoCrash) {
  constexpr size_t kDepth = 100'000;
  const std::string nested = std::string(kDepth, '[') + std::string(kDepth, ']');
  for (const char* key : {"hidden_size", "eos_token_id", "rms_norm_eps", "rope_scaling"}) {
    GOLDEN_CONFIG(config, "llama");
    config.erase(key);
    std::string text = config.dump();
    text.insert(1, std::string("\"") + key + "\":" + nested + ",");
    const auto spec = ParseModelSpec(text, {.file = "config.json"});
    ASSERT_FALSE(spec.ok()) << key;
    EXPECT_THAT(Message(spec.status()), HasSubstr(key));
  }
}

TEST(ModelSpec, Trial_CK_1_TiedEmbeddingsNeedNoHead) {
  GOLDEN_CONFIG(config, "qwen3_moe");
  config["tie_word_embeddings"] = true;
  EXPECT_EQ(Parse(config)->head, "model.embed_tokens.weight");
  config.erase("tie_word_embeddings");
  const std::string text = config.dump();
  EXPECT_TRUE(ParseModelSpec(text, {.file = "c", .has_head = false})->tied_embeddings);
  EXPECT_FALSE(ParseModelSpec(text, {.file = "c", .has_head = true})->tied_embeddings);
}

TEST(ModelSpec, Trial_CK_1_ExplicitlyUntiedWithoutHeadIsRefused) {
  const auto dir = testing::SharedPath("golden/models/qwen3");
  if (!dir) GTEST_SKIP() << "no golden/models/qwen3";
  testing::TempDir temp;
  temp.CopyFrom(*dir);
  Json config = Json::parse(testing::ReadWholeFile(*dir / "config.json"));
  config["tie_word_embeddings"] = false;
  temp.Write("config.json", config.dump());
  const auto checkpoint = Checkpoint::Open(temp.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Message(LoadModelSpec(**checkpoint).status()),
              HasSubstr("tensor 'lm_head.weight' is missing (1 of 36 required tensors are)"));
}

TEST(ModelSpec, Trial_CK_5_RopeTypeHasTwoSpellings) {
  GOLDEN_CONFIG(config, "deepseek_v3");  // spelled "type"
  const auto old_spelling = Parse(config);
  ASSERT_TRUE(old_spelling.ok());
  config["rope_scaling"]["rope_type"] = "yarn";
  const auto both = Parse(config);
  ASSERT_TRUE(both.ok()) << both.status();
  config["rope_scaling"].erase("type");
  const auto new_spelling = Parse(config);
  config["rope_parameters"] = config["rope_scaling"];
  config["rope_parameters"]["rope_theta"] = config["rope_theta"];
  config.erase("rope_scaling");
  config.erase("rope_theta");
  const auto parameters = Parse(config);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  for (const auto& other : {both, new_spelling, parameters}) {
    EXPECT_EQ(other->rope.inv_freq, old_spelling->rope.inv_freq);
    EXPECT_EQ(other->attention.softmax_scale, old_spelling->attention.softmax_scale);
  }
  config["rope_parameters"]["type"] = "linear";
  EXPECT_THAT(Message(Parse(config).status()), HasSubstr("'yarn' while 'type' is 'linear'"));
  config["rope_parameters"] = {{"type", "longrope"}};
  EXPECT_THAT(Message(Parse(config).status()), HasSubstr("supported are default, linear"));
}

TEST(ModelSpec, Trial_CK_7_EndIdsAreTheUnion) {
  const auto dir = testing::SharedPath("golden/models/qwen3_moe");
  if (!dir) GTEST_SKIP() << "no golden/models/qwen3_moe";
  testing::TempDir temp;
  temp.CopyFrom(*dir);
  temp.Write("generation_config.json", R"({"eos_token_id": [1, 232], "temperature": 0.6})");
  const auto checkpoint = Checkpoint::Open(temp.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto spec = LoadModelSpec(**checkpoint);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(spec->end_ids, ElementsAre(1u, 232u));
  const auto generation = LoadGenerationConfig(temp.path());
  EXPECT_EQ(generation->temperature, 0.6f);
  EXPECT_FALSE(generation->top_p.has_value());
  temp.Write("generation_config.json", R"({"eos_token_id": "x"})");
  EXPECT_THAT(Message(LoadModelSpec(**checkpoint).status()), HasSubstr("generation_config.json"));
}

TEST(ModelSpec, Trial_CK_13_MissingScaleIsOneAndZeroIsRefused) {
  GOLDEN_CONFIG(config, "deepseek_v2");
  EXPECT_EQ(Parse(config)->moe.router.factor, 4.0f);
  config.erase("scoring_func");
  for (const Json& factor : {Json(nullptr), Json(1.0)}) {
    config["routed_scaling_factor"] = factor;
    const auto spec = Parse(config);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->moe.router.factor, 1.0f);
    EXPECT_EQ(spec->moe.router.score, RouterScore::kSoftmax);
  }
  config.erase("routed_scaling_factor");
  EXPECT_EQ(Parse(config)->moe.router.factor, 1.0f);
  config["routed_scaling_factor"] = 0;
  EXPECT_THAT(Message(Parse(config).status()), HasSubstr("routed_scaling_factor"));
  GOLDEN_CONFIG(v3, "deepseek_v3");
  v3.erase("scoring_func");
  EXPECT_EQ(Parse(v3)->moe.router.score, RouterScore::kSigmoid);
}

TEST(ModelSpec, YarnRecipeExtendsTheContext) {
  GOLDEN_CONFIG(config, "qwen3");
  EXPECT_EQ(Parse(config)->max_context, 512);
  config["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 512}};
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->max_context, 2048);
  EXPECT_NEAR(spec->rope.attention_factor, 1.1386294, 1e-6);
}

}  // namespace
}  // namespace tandem
