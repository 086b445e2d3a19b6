// Single files, shards, and trials CK-3, CK-9 and RT-1 at the level of the reader.

#include "common/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RawBytes;
using testing::SafetensorsBuilder;

constexpr const char* kIndex = "model.safetensors.index.json";

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::string OneTensor(const std::string& name, std::vector<float> values) {
  return SafetensorsBuilder()
      .Add(name, "F32", {static_cast<int64_t>(values.size())}, RawBytes(values))
      .Build();
}

TEST(Checkpoint, ReadsASingleFile) {
  testing::TempDir dir;
  dir.Write("model.safetensors",
            SafetensorsBuilder()
                .Add("w", "BF16", {2, 2}, RawBytes<uint16_t>({0x3f80, 0, 0, 0xc000}))
                .Add("ids", "I64", {1}, RawBytes<int64_t>({3}))
                .Build());
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->tensor_count(), 2u);
  std::vector<float> out(4);
  ASSERT_TRUE((*checkpoint)->ReadF32("w", out).ok());
  EXPECT_THAT(out, ElementsAre(1, 0, 0, -2));
  EXPECT_EQ((*checkpoint)->Find("nope"), nullptr);
  EXPECT_THAT(Message((*checkpoint)->ReadF32("nope", out)), HasSubstr("'nope' is missing"));
  std::vector<float> one(1);
  EXPECT_THAT(Message((*checkpoint)->ReadF32("ids", one)), HasSubstr("dtype is I64"));
  EXPECT_THAT(Message((*checkpoint)->ReadF32("w", one)), HasSubstr("shape is [2,2], expected 1"));
  const int64_t shape[] = {4, 1};
  EXPECT_THAT(Message((*checkpoint)->Get("w", shape).status()),
              HasSubstr("shape is [2,2], expected [4,1]"));
}

TEST(Checkpoint, EmptyDirectoryIsNamed) {
  testing::TempDir dir;
  EXPECT_THAT(Message(Checkpoint::Open(dir.path()).status()),
              HasSubstr(dir.path().string() + ": holds neither model.safetensors"));
}

TEST(Checkpoint, Trial_CK_3_ShardCountInTheNameMeansNothing) {
  testing::TempDir dir;
  dir.Write("model-00001-of-00004.safetensors", OneTensor("a", {1}));
  dir.Write("model-00002-of-00004.safetensors", OneTensor("b", {2}));
  dir.Write(kIndex, R"({"metadata":{"total_size":8},"weight_map":{)"
                    R"("a":"model-00001-of-00004.safetensors",)"
                    R"("b":"model-00002-of-00004.safetensors"}})");
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<float> out(1);
  ASSERT_TRUE((*checkpoint)->ReadF32("b", out).ok());
  EXPECT_EQ(out[0], 2);
}

TEST(Checkpoint, Trial_CK_3_StaleIndexNamesFileAndTensor) {
  testing::TempDir dir;
  dir.Write("model-00001-of-00004.safetensors", OneTensor("a", {1}));
  dir.Write(kIndex, R"({"weight_map":{"a":"model-00001-of-00004.safetensors",)"
                    R"("b":"model-00003-of-00004.safetensors"}})");
  const std::string error = Message(Checkpoint::Open(dir.path()).status());
  EXPECT_THAT(error, HasSubstr("model-00003-of-00004.safetensors, which is missing"));
  EXPECT_THAT(error, HasSubstr("tensor 'b'"));
  EXPECT_EQ(Checkpoint::Open(dir.path()).status().code(), absl::StatusCode::kNotFound);
}

TEST(Checkpoint, RefusesAnIndexThatLies) {
  testing::TempDir dir;
  dir.Write("1.safetensors", OneTensor("a", {1}));
  dir.Write("2.safetensors", OneTensor("b", {1}));
  dir.Write(kIndex, R"({"weight_map":{"a":"2.safetensors","b":"1.safetensors"}})");
  EXPECT_THAT(Message(Checkpoint::Open(dir.path()).status()), HasSubstr("does not hold it"));
  dir.Write("2.safetensors", OneTensor("a", {1}));
  dir.Write(kIndex, R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  EXPECT_THAT(Message(Checkpoint::Open(dir.path()).status()), HasSubstr("tensor 'a': is also in"));
  for (const char* index :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":7}})",
        R"({"weight_map":{"a":"../1.safetensors"}})",
        R"({"weight_map":{"a":"1.safetensors\u0000"}})",
        R"({"weight_map":{"a":"1.safetensors"})"}) {
    dir.Write(kIndex, index);
    const auto checkpoint = Checkpoint::Open(dir.path());
    ASSERT_FALSE(checkpoint.ok()) << index;
    EXPECT_THAT(Message(checkpoint.status()), HasSubstr(kIndex)) << index;
  }
}

TEST(Checkpoint, Trial_CK_9_TruncatedShardIsNamed) {
  const auto cut = testing::SharedPath("trials/truncated_by_one.safetensors");
  if (!cut) GTEST_SKIP() << "no trials/truncated_by_one.safetensors";
  testing::TempDir dir;
  dir.Write("model-00001-of-00001.safetensors", testing::ReadWholeFile(*cut));
  dir.Write(kIndex, R"({"weight_map":{"a":"model-00001-of-00001.safetensors"}})");
  const std::string error = Message(Checkpoint::Open(dir.path()).status());
  EXPECT_THAT(error, HasSubstr("model-00001-of-00001.safetensors"));
  EXPECT_THAT(error, HasSubstr("expected 79 bytes, the file has 78"));
}

TEST(Checkpoint, Trial_RT_1_NonFiniteWeightsAreRefused) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (float bad : {kNan, -kNan, kInf, -kInf}) {
    testing::TempDir dir;
    dir.Write("model.safetensors", OneTensor("model.embed_tokens.weight", {1, 2, bad, 3}));
    const auto checkpoint = Checkpoint::Open(dir.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    std::vector<float> out(4);
    const std::string error = Message((*checkpoint)->ReadF32("model.embed_tokens.weight", out));
    EXPECT_THAT(error, HasSubstr("model.safetensors: tensor 'model.embed_tokens.weight'"));
    EXPECT_THAT(error, HasSubstr("element 2 is not a finite number"));
  }
}

}  // namespace
}  // namespace tandem
