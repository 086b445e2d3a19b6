// Golden hub models written as GGUF: the same spec, the same tensors; and what a GGUF may say that
// is refused. Trials CK-1 and CK-13 as GGUF files meet them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/model/gguf_config.h"
#include "common/model/memory_plan.h"
#include "common/model/model_files.h"
#include "common/model/model_loader.h"
#include "common/model/model_tensors.h"
#include "tests/testing/gguf_convert.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::AllOf;
using testing::GgufBuilder;
using testing::GgufConverter;
using ::testing::HasSubstr;
using testing::RawBytes;
using testing::SharedPath;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::vector<float> Values(const Checkpoint& checkpoint, const RequiredTensor& need) {
  int64_t elements = 1;
  for (int64_t dim : need.shape) elements *= dim;
  std::vector<float> values(static_cast<size_t>(elements));
  if (need.role == TensorRole::kVector) {
    EXPECT_TRUE(checkpoint.ReadF32(need.name, values).ok()) << need.name;
    return values;
  }
  const auto matrix =
      WeightMatrix::Create(checkpoint, need.name, need.shape[0], need.shape[1], QuantScheme{});
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  if (matrix.ok()) {
    EXPECT_TRUE(matrix->ReadF32({0, need.shape[0]}, {0, need.shape[1]}, values).ok());
  }
  return values;
}

class GgufGolden : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto dir = SharedPath(std::string("golden/models/") + GetParam());
    if (!dir) GTEST_SKIP() << "no golden/models/" << GetParam();
    hub_dir_ = *dir;
  }
  std::filesystem::path hub_dir_;
  testing::TempDir dir_;
};

TEST_P(GgufGolden, GivesTheHubModelsSpecAndTensors) {
  const auto file = dir_.Write("m.gguf", GgufConverter(hub_dir_).Convert().Build());
  const auto hub = Checkpoint::Open(hub_dir_);
  const auto gguf = Checkpoint::Open(file);
  ASSERT_TRUE(hub.ok() && gguf.ok()) << hub.status() << gguf.status();
  const auto want = LoadModelSpec(**hub);
  const auto got = LoadModelSpec(**gguf);
  ASSERT_TRUE(want.ok() && got.ok()) << want.status() << got.status();
  EXPECT_EQ(got->model_type, want->model_type);
  EXPECT_EQ(got->vocab, want->vocab);
  EXPECT_EQ(got->max_context, want->max_context);
  EXPECT_EQ(got->norm_eps, want->norm_eps);
  EXPECT_EQ(got->tied_embeddings, want->tied_embeddings);
  EXPECT_EQ(got->attention.head_dim, want->attention.head_dim);
  EXPECT_EQ(got->attention.kv_heads, want->attention.kv_heads);
  EXPECT_EQ(got->attention.softmax_scale, want->attention.softmax_scale);
  EXPECT_EQ(got->moe.top_k, want->moe.top_k);
  EXPECT_EQ(got->moe.router.renormalize, want->moe.router.renormalize);
  EXPECT_EQ(got->end_ids, want->end_ids);
  EXPECT_EQ(got->bos_id, want->bos_id);
  ASSERT_EQ(got->rope.inv_freq.size(), want->rope.inv_freq.size());
  for (size_t i = 0; i < got->rope.inv_freq.size(); ++i) {
    EXPECT_NEAR(got->rope.inv_freq[i], want->rope.inv_freq[i], 3e-7f * want->rope.inv_freq[i]);
  }
  const auto required = RequiredTensors(*want);
  ASSERT_EQ(RequiredTensors(*got).size(), required.size());
  for (const RequiredTensor& need : required) {
    EXPECT_EQ(Values(**gguf, need), Values(**hub, need)) << need.name;
  }
  EXPECT_EQ(DenseWeightBytes(**gguf, *got), DenseWeightBytes(**hub, *want));
  for (const TensorRole role : {TensorRole::kEmbedding, TensorRole::kLinear, TensorRole::kRouted}) {
    EXPECT_EQ(StoredBytes(**gguf, *got, role), StoredBytes(**hub, *want, role));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GgufGolden,
                         ::testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"),
                         [](const auto& info) { return std::string(info.param); });

class GgufRefusals : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto dir = SharedPath("golden/models/llama");
    if (!dir) GTEST_SKIP() << "no golden/models/llama";
    hub_dir_ = *dir;
  }
  GgufBuilder Llama() const { return GgufConverter(hub_dir_).Convert(); }
  std::string ErrorOf(const GgufBuilder& builder) const {
    const auto checkpoint = Checkpoint::Open(dir_.Write("m.gguf", builder.Build()));
    if (!checkpoint.ok()) return Message(checkpoint.status());
    const auto spec = LoadModelSpec(**checkpoint);
    return spec.ok() ? "accepted" : Message(spec.status());
  }

  std::filesystem::path hub_dir_;
  testing::TempDir dir_;
};

TEST_F(GgufRefusals, WhatWouldBeComputedWrongly) {
  EXPECT_EQ(ErrorOf(Llama()), "accepted");
  EXPECT_THAT(ErrorOf(Llama().F32("llama.logit_scale", 2)),
              AllOf(HasSubstr("m.gguf: key 'llama.logit_scale'"), HasSubstr("not supported")));
  EXPECT_EQ(ErrorOf(Llama().U32("llama.attention.sliding_window", 0)), "accepted");
  EXPECT_THAT(ErrorOf(Llama().U32("llama.attention.sliding_window", 64)),
              HasSubstr("key 'llama.attention.sliding_window'"));
  EXPECT_THAT(ErrorOf(Llama().String("llama.rope.scaling.type", "longrope")),
              AllOf(HasSubstr("rope_scaling"), HasSubstr("'longrope'")));
  EXPECT_THAT(ErrorOf(Llama().Tensor("blk.0.ffn_magic.weight", {1}, 0, RawBytes<float>({1}))),
              HasSubstr("tensor 'blk.0.ffn_magic.weight': is not known to architecture 'llama'"));
  EXPECT_THAT(ErrorOf(Llama().Tensor("blk.00.attn_norm.weight", {64}, 0, std::string(256, '\0'))),
              HasSubstr("tensor 'model.layers.0.input_layernorm.weight': is there twice"));
  EXPECT_THAT(ErrorOf(Llama().U32("llama.expert_count", 8)),
              HasSubstr("key 'llama.expert_used_count': is missing"));
}

TEST_F(GgufRefusals, UnknownArchitecturesByName) {
  GgufBuilder unknown;
  unknown.String("general.architecture", "mamba");
  EXPECT_THAT(ErrorOf(unknown), AllOf(HasSubstr("key 'general.architecture': 'mamba'"),
                                      HasSubstr("supported are llama, qwen2, qwen3, qwen3moe")));
  EXPECT_THAT(ErrorOf(GgufBuilder()), HasSubstr("key 'general.architecture': is missing"));
}

TEST_F(GgufRefusals, MissingKeysAndRopeFactorsOfAnotherSize) {
  GgufBuilder bare;
  bare.String("general.architecture", "llama").U32("llama.embedding_length", 4);
  EXPECT_THAT(ErrorOf(bare), HasSubstr("key 'llama.attention.head_count': is missing"));
  bare.U32("llama.attention.head_count", 2);
  EXPECT_THAT(ErrorOf(bare), HasSubstr("tensor 'token_embd.weight' is missing"));
  bare.Tensor("token_embd.weight", {2, 4}, 0, std::string(32, '\0'));
  EXPECT_THAT(ErrorOf(bare), HasSubstr("key 'llama.context_length': is missing"));
  const auto model = GgufModel::Open(dir_.Write(
      "r.gguf",
      GgufBuilder().Tensor("rope_freqs.weight", {2}, 0, RawBytes<float>({1, 0})).Build()));
  ASSERT_TRUE(model.ok()) << model.status();
  ModelSpec spec;
  spec.rope.inv_freq = {1, 1, 1};
  EXPECT_THAT(Message(ApplyGgufRopeFactors(**model, spec)), HasSubstr("is not F32 [3]"));
  spec.rope.inv_freq = {1, 1};
  EXPECT_THAT(Message(ApplyGgufRopeFactors(**model, spec)), HasSubstr("element 1 is not"));
}

absl::StatusOr<ModelSpec> SpecOf(const testing::TempDir& dir, const GgufBuilder& builder) {
  const auto checkpoint = Checkpoint::Open(dir.Write("m.gguf", builder.Build()));
  if (!checkpoint.ok()) return checkpoint.status();
  return LoadModelSpec(**checkpoint);
}

TEST(GgufTrials, Trial_CK_1_WithoutAnOutputTensorEmbeddingsAreTied) {
  const auto dir = SharedPath("golden/models/qwen3_moe");
  if (!dir) GTEST_SKIP() << "no golden/models/qwen3_moe";
  testing::TempDir temp;
  const auto untied = SpecOf(temp, GgufConverter(*dir).Convert());
  ASSERT_TRUE(untied.ok()) << untied.status();
  EXPECT_FALSE(untied->tied_embeddings);
  const auto tied = SpecOf(temp, GgufConverter(*dir).Without("lm_head.weight").Convert());
  ASSERT_TRUE(tied.ok()) << tied.status();
  EXPECT_TRUE(tied->tied_embeddings);
}

TEST(GgufTrials, Trial_CK_13_MissingScaleAndGatingAreTheFamilys) {
  const auto dir = SharedPath("golden/models/qwen3_moe");
  if (!dir) GTEST_SKIP() << "no golden/models/qwen3_moe";
  testing::TempDir temp;
  const auto model = [&] { return GgufConverter(*dir).Convert(); };
  const auto absent = SpecOf(temp, model());
  ASSERT_TRUE(absent.ok()) << absent.status();
  EXPECT_EQ(absent->moe.router.factor, 1);
  EXPECT_EQ(absent->moe.router.score, RouterScore::kSoftmax);
  const auto one = SpecOf(
      temp, model().F32("qwen3moe.expert_weights_scale", 1).U32("qwen3moe.expert_gating_func", 1));
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->moe.router.factor, absent->moe.router.factor);
  EXPECT_EQ(one->moe.router.score, absent->moe.router.score);
  EXPECT_THAT(Message(SpecOf(temp, model().F32("qwen3moe.expert_weights_scale", 0)).status()),
              HasSubstr("m.gguf: key 'qwen3moe.expert_weights_scale': is 0"));
  EXPECT_THAT(Message(SpecOf(temp, model().U32("qwen3moe.expert_gating_func", 2)).status()),
              HasSubstr("key 'qwen3moe.expert_gating_func': is 2"));
}

TEST_F(GgufRefusals, TheHashCoversTheFile) {
  const auto hash = [&](const GgufBuilder& builder, const char* name) {
    const auto checkpoint = Checkpoint::Open(dir_.Write(name, builder.Build()));
    const auto spec = LoadModelSpec(**checkpoint);
    return ModelHash(**checkpoint, *spec);
  };
  const uint64_t one = hash(Llama(), "a.gguf");
  EXPECT_NE(one, hash(Llama(), "b.gguf"));
}

TEST_F(GgufRefusals, ModelFilesReadNoWeights) {
  const auto file = dir_.Write("m.gguf", Llama().Build());
  const auto files = OpenModelFiles(dir_.path());
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(files->config_file, file.string());
  ASSERT_NE(files->gguf, nullptr);
  const auto spec = ParseModelSpec(*files);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->vocab, 256);
  const auto hub = OpenModelFiles(hub_dir_);
  ASSERT_TRUE(hub.ok()) << hub.status();
  EXPECT_EQ(hub->gguf, nullptr);
  EXPECT_THAT(hub->config_file, HasSubstr("config.json"));
}

}  // namespace
}  // namespace tandem
