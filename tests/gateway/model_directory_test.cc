// What the gateway reads of a GGUF file; directories are served in every integration test.

#include "gateway/model_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/gateway/text/text_testing.h"
#include "tests/testing/gguf_builder.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gateway {
namespace {

using tandem::testing::GgufBuilder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Keys of a dense model with an embedding of `vocab` rows: all that is read without weights.
GgufBuilder Model(int64_t vocab) {
  GgufBuilder builder;
  builder.String("general.architecture", "qwen2").U32("qwen2.context_length", 64);
  builder.U32("qwen2.embedding_length", 4).U32("qwen2.block_count", 1);
  builder.U32("qwen2.feed_forward_length", 4).U32("qwen2.attention.head_count", 2);
  builder.F32("qwen2.attention.layer_norm_rms_epsilon", 1e-5f);
  builder.U32("tokenizer.ggml.eos_token_id", 7);
  builder.Tensor("token_embd.weight", {vocab, 4}, 0,
                 std::string(static_cast<size_t>(vocab) * 16, '\0'));
  return builder;
}

GgufBuilder WithTokenizer(int64_t vocab) {
  GgufBuilder builder = Model(vocab);
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(testing::ByteSpelling(byte));
  tokens.push_back("<|im_end|>");
  std::vector<int32_t> types(256, 1);
  types.push_back(3);
  builder.String("tokenizer.ggml.model", "gpt2").String("tokenizer.ggml.pre", "qwen2");
  builder.Strings("tokenizer.ggml.tokens", tokens).Ints("tokenizer.ggml.token_type", types);
  return builder.Strings("tokenizer.ggml.merges", {});
}

TEST(ModelDirectory, ReadsTokenizerAndEndTokensOfAGgufFile) {
  const tandem::testing::TempDir dir;
  dir.Write("m.gguf", WithTokenizer(300).Build());
  const auto model = LoadModelDirectory(dir.path());
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_NE(model->tokenizer, nullptr);
  EXPECT_EQ(model->tokenizer->eos_id(), 7u);
  EXPECT_EQ(model->chat_template, nullptr);
  EXPECT_THAT(model->end_ids, ElementsAre(7u, 256u));  // <|im_end|> ends an answer as well
}

TEST(ModelDirectory, ServesTokenIdsWhereTheTokenizerIsOfAnotherKind) {
  const tandem::testing::TempDir dir;
  const auto file = dir.Write("m.gguf", Model(300).String("tokenizer.ggml.model", "llama").Build());
  const auto model = LoadModelDirectory(file);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->tokenizer, nullptr);
  EXPECT_THAT(model->end_ids, ElementsAre(7u));
}

TEST(ModelDirectory, RefusesAGgufTokenizerBeyondTheEmbedding) {
  const tandem::testing::TempDir dir;
  const auto file = dir.Write("m.gguf", WithTokenizer(200).Build());
  EXPECT_THAT(std::string(LoadModelDirectory(file).status().message()),
              HasSubstr("token ids up to 256, but " + file.string() + " a vocabulary of 200"));
}

}  // namespace
}  // namespace tandem::gateway
