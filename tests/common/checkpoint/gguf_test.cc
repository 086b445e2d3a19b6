// Every way a GGUF file can lie, values of every kind, sets of files, and trial CK-11.

#include "common/checkpoint/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/testing/gguf_builder.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::GgufBuilder;
using testing::GgufString;
using testing::GgufWire;
using ::testing::HasSubstr;
using testing::LittleEndian;
using testing::RawBytes;
using testing::SharedPath;

constexpr uint32_t kF32 = 0;
constexpr uint32_t kQ8_0 = 8;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::string ErrorOf(const std::string& bytes) {
  const auto contents = ParseGguf("f.gguf", bytes);
  return contents.ok() ? "accepted" : Message(contents.status());
}

std::string Zeros(size_t bytes) { return std::string(bytes, '\0'); }

TEST(Gguf, ReadsTheGoldenFilesValuesAndTensors) {
  const auto path = SharedPath("golden/quant/gguf/all_types.gguf");
  if (!path) GTEST_SKIP() << "no golden/quant/gguf/all_types.gguf";
  const auto opened = GgufModel::Open(*path);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const GgufModel& model = **opened;
  EXPECT_EQ(model.files()[0].contents.version, 3u);
  EXPECT_EQ(*model.String("test.string"), "Grüße, 世界");
  EXPECT_EQ(*model.Bool("test.bool"), true);
  EXPECT_EQ(*model.Int("test.u8"), 200);
  EXPECT_EQ(*model.Int("test.i8"), -3);
  EXPECT_EQ(*model.Int("test.u16"), 60000);
  EXPECT_EQ(*model.Int("test.i16"), -30000);
  EXPECT_EQ(*model.Int("test.i32"), -5);
  EXPECT_EQ(*model.Int("test.u64"), 1099511627777);
  EXPECT_EQ(*model.Int("test.i64"), -1099511627776);
  EXPECT_EQ(*model.Real("test.f32"), 1.5);
  EXPECT_EQ(*model.Real("test.f64"), -2.25);
  EXPECT_THAT(**model.Strings("test.strings"), ElementsAre("a", "", "日本"));
  EXPECT_THAT(**model.Ints("test.ints"), ElementsAre(1, 2, 3));
  EXPECT_THAT(model.Find("test.floats")->reals, ElementsAre(0.5, -0.25));
  EXPECT_EQ(model.tensors().size(), 20u);
  const GgufTensor* tensor = model.FindTensor("blk.0.ffn_up_exps.Q4_K");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->rank, 3);
  EXPECT_THAT(std::vector<int64_t>(tensor->shape.begin(), tensor->shape.begin() + 3),
              ElementsAre(3, 4, 256));
  EXPECT_EQ(tensor->offset % 64, 0u);
}

TEST(Gguf, Trial_CK_11_DegenerateFilesAreRefusedByName) {
  const auto zero_dim = SharedPath("trials/zero_dim.gguf");
  const auto align_zero = SharedPath("trials/align_zero.gguf");
  if (!zero_dim || !align_zero) GTEST_SKIP() << "no trials/zero_dim.gguf, align_zero.gguf";
  EXPECT_THAT(Message(GgufModel::Open(*zero_dim).status()),
              AllOf(HasSubstr("zero_dim.gguf"), HasSubstr("tensor 't.weight'"),
                    HasSubstr("dimension 1 is 0")));
  EXPECT_THAT(
      Message(GgufModel::Open(*align_zero).status()),
      AllOf(HasSubstr("align_zero.gguf"), HasSubstr("key 'general.alignment'"), HasSubstr("is 0")));
}

TEST(Gguf, TypedAccessNamesFileAndKey) {
  testing::TempDir dir;
  GgufBuilder builder;
  builder.String("s", "text").U32("n", 7).Ints("list", {1});
  const auto model = GgufModel::Open(dir.Write("m.gguf", builder.Build()));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_FALSE((*model)->Int("absent")->has_value());
  EXPECT_EQ(*(*model)->Strings("absent"), nullptr);
  EXPECT_EQ(*(*model)->Real("n"), 7.0);
  EXPECT_THAT(Message((*model)->Int("s").status()),
              AllOf(HasSubstr("m.gguf: key 's'"), HasSubstr("not an integer")));
  EXPECT_THAT(Message((*model)->String("n").status()), HasSubstr("key 'n': is not a string"));
  EXPECT_THAT(Message((*model)->Bool("n").status()), HasSubstr("not a boolean"));
  EXPECT_THAT(Message((*model)->Strings("list").status()), HasSubstr("not an array of strings"));
  EXPECT_THAT(Message((*model)->Ints("s").status()), HasSubstr("not an array of integers"));
}

TEST(Gguf, AcceptsVersionTwoAndArraysOfArrays) {
  const std::string inner =
      LittleEndian<uint32_t>(4) + LittleEndian<uint64_t>(1) + LittleEndian<uint32_t>(9);
  GgufBuilder builder;
  builder.Raw("nested", static_cast<uint32_t>(GgufWire::kArray),
              LittleEndian<uint32_t>(9) + LittleEndian<uint64_t>(1) + inner);
  builder.Tensor("t", {2, 2}, kF32, RawBytes<float>({1, 2, 3, 4}));
  const std::string bytes = builder.Build(2);
  const auto contents = ParseGguf("f", bytes);
  ASSERT_TRUE(contents.ok()) << contents.status();
  EXPECT_EQ(contents->tensors[0].bytes, 16u);
}

TEST(Gguf, RefusesOtherHeaders) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("does not begin"));
  EXPECT_THAT(ErrorOf("GGML" + Zeros(32)), HasSubstr("does not begin"));
  EXPECT_THAT(ErrorOf("GGUF"), HasSubstr("truncated"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Build(1)), HasSubstr("version 1 is not supported"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Build(4)), HasSubstr("version 4"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Build(3u << 24)), HasSubstr("big-endian"));
  EXPECT_THAT(ErrorOf("GGUF" + LittleEndian<uint32_t>(3) + LittleEndian<uint64_t>(1ull << 60) +
                      LittleEndian<uint64_t>(0) + Zeros(64)),
              HasSubstr("tensors, more than the file can hold"));
  EXPECT_THAT(ErrorOf("GGUF" + LittleEndian<uint32_t>(3) + LittleEndian<uint64_t>(0) +
                      LittleEndian<uint64_t>(1ull << 60) + Zeros(64)),
              HasSubstr("key/values, more than the file can hold"));
}

TEST(Gguf, RefusesBrokenValues) {
  const auto error = [](uint32_t type, std::string_view bytes) {
    return ErrorOf(GgufBuilder().Raw("k", type, bytes).Build());
  };
  EXPECT_THAT(error(99, "xxxxxxxx"), HasSubstr("key 'k': value type 99 is unknown"));
  EXPECT_THAT(error(7, "\x02"), HasSubstr("a boolean is 2"));
  EXPECT_THAT(error(8, LittleEndian<uint64_t>(1ull << 62)), HasSubstr("value of key 'k'"));
  const auto array = [&](uint32_t element, uint64_t count, std::string_view bytes) {
    return error(9, LittleEndian(element) + LittleEndian(count) + std::string(bytes));
  };
  EXPECT_THAT(array(4, 1ull << 62, "xxxx"), HasSubstr("elements, more than the file can hold"));
  EXPECT_THAT(array(77, 1, "xxxx"), HasSubstr("element type 77"));
  EXPECT_THAT(array(8, 1, LittleEndian<uint64_t>(1 << 20)), HasSubstr("truncated"));
  EXPECT_THAT(array(10, 1, LittleEndian<uint64_t>(~0ull)), HasSubstr("beyond the range"));
  std::string deep;
  for (int i = 0; i < 8; ++i) deep += LittleEndian<uint32_t>(9) + LittleEndian<uint64_t>(1);
  EXPECT_THAT(error(9, deep + Zeros(64)), HasSubstr("nested too deeply"));
  EXPECT_THAT(ErrorOf(GgufBuilder().U32("k", 1).U32("k", 2).Build()),
              HasSubstr("'k': occurs twice"));
  EXPECT_THAT(ErrorOf(GgufBuilder().U32("", 1).Build()), HasSubstr("a key is empty"));
  EXPECT_THAT(ErrorOf(GgufBuilder().U32(std::string(70000, 'k'), 1).Build()),
              HasSubstr("longer than 65535"));
  for (const uint32_t alignment : {0u, 3u, 1u << 30}) {
    EXPECT_THAT(ErrorOf(GgufBuilder().U32("general.alignment", alignment).Build()),
                HasSubstr("key 'general.alignment': is " + std::to_string(alignment)));
  }
  EXPECT_THAT(ErrorOf(GgufBuilder().String("general.alignment", "x").Build()),
              HasSubstr("not an unsigned integer"));
}

TEST(Gguf, RefusesBrokenTensors) {
  const auto error = [](std::vector<int64_t> shape, uint32_t type, uint64_t offset) {
    return ErrorOf(GgufBuilder().TensorAt("t", std::move(shape), type, offset).Build() + Zeros(64));
  };
  EXPECT_EQ(error({4, 4}, kF32, 0), "accepted");
  EXPECT_THAT(error({}, kF32, 0), HasSubstr("tensor 't': has 0 dimensions"));
  EXPECT_THAT(error({1, 1, 1, 1, 1}, kF32, 0), HasSubstr("has 5 dimensions"));
  EXPECT_THAT(error({4, 0}, kF32, 0), HasSubstr("dimension 0 is 0"));
  EXPECT_THAT(error({-4, 4}, kF32, 0), HasSubstr("dimension 1 is -4"));
  EXPECT_THAT(error({int64_t{1} << 40, int64_t{1} << 40}, kF32, 0), HasSubstr("overflows"));
  EXPECT_THAT(error({int64_t{1} << 62, 1}, kF32, 0), HasSubstr("overflows"));
  EXPECT_THAT(error({4, 16}, kQ8_0, 0), HasSubstr("not whole blocks of Q8_0 (32)"));
  EXPECT_THAT(error({4, 4}, 18, 0), HasSubstr("type 18 (IQ3_XXS) is not supported"));
  EXPECT_THAT(error({4, 4}, 5, 0), HasSubstr("type 5 is not supported"));
  EXPECT_THAT(error({4, 4}, kF32, 8), HasSubstr("not a multiple of the alignment 32"));
  EXPECT_THAT(error({4, 4}, kF32, 32), HasSubstr("truncated"));
  EXPECT_THAT(error({4, 4}, kF32, 1ull << 63), HasSubstr("truncated"));
  EXPECT_THAT(error({4, 4}, kF32, ~0ull - 31), HasSubstr("overflows"));
  GgufBuilder overlapping;
  overlapping.TensorAt("a", {16}, kF32, 0).TensorAt("b", {8}, kF32, 32);
  EXPECT_THAT(ErrorOf(overlapping.Build() + Zeros(64)),
              HasSubstr("tensor 'b': overlaps tensor 'a'"));
  EXPECT_THAT(
      ErrorOf(GgufBuilder().TensorAt("a", {1}, kF32, 0).TensorAt("a", {1}, kF32, 32).Build()),
      HasSubstr("tensor 'a': the name occurs twice"));
  EXPECT_THAT(ErrorOf(GgufBuilder().TensorAt("", {1}, kF32, 0).Build()), HasSubstr("empty name"));
}

TEST(Gguf, RefusesEveryCutOfAFile) {
  GgufBuilder builder;
  builder.String("general.architecture", "llama").Strings("list", {"a", "b"});
  builder.Tensor("t", {2, 32}, kQ8_0, std::string(68, 'x'));
  const std::string whole = builder.Build();
  ASSERT_EQ(ErrorOf(whole), "accepted");
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const auto contents = ParseGguf("f", std::string_view(whole).substr(0, bytes));
    EXPECT_FALSE(contents.ok()) << bytes;
  }
}

class GgufSet : public ::testing::Test {
 protected:
  std::string Part(int no, int count, const std::string& tensor, int total = 3) const {
    GgufBuilder builder;
    if (no == 0) builder.String("general.architecture", "llama");
    builder.Scalar("split.no", GgufWire::kU16, static_cast<uint16_t>(no));
    builder.Scalar("split.count", GgufWire::kU16, static_cast<uint16_t>(count));
    builder.Scalar("split.tensors.count", GgufWire::kI32, int32_t{total});
    builder.Tensor(tensor, {1}, kF32, RawBytes<float>({static_cast<float>(no)}));
    return builder.Build();
  }
  void WriteAll() {
    for (int no = 0; no < 3; ++no) Write(no, Part(no, 3, "t" + std::to_string(no)));
  }
  void Write(int no, const std::string& bytes) { dir_.Write(Name(no), bytes); }
  static std::string Name(int no) { return "m-0000" + std::to_string(no + 1) + "-of-00003.gguf"; }
  absl::StatusOr<std::unique_ptr<GgufModel>> Open(int no = 0) const {
    return GgufModel::Open(dir_.path() / Name(no));
  }

  testing::TempDir dir_;
};

TEST_F(GgufSet, OpensAllFilesAsOneModel) {
  WriteAll();
  const auto model = Open();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->files().size(), 3u);
  for (int no = 0; no < 3; ++no) {
    const GgufTensor* tensor = (*model)->FindTensor("t" + std::to_string(no));
    ASSERT_NE(tensor, nullptr);
    EXPECT_THAT(std::string(tensor->file), HasSubstr(Name(no)));
    float value = -1;
    std::memcpy(&value, tensor->data, sizeof(value));
    EXPECT_EQ(value, static_cast<float>(no));
  }
  EXPECT_EQ(*FindGguf(dir_.path()), (dir_.path() / Name(0)).string());
}

TEST_F(GgufSet, RefusesWhatDoesNotFitTogether) {
  WriteAll();
  EXPECT_THAT(Message(Open(1).status()), HasSubstr(Name(0)));
  Write(1, Part(2, 3, "t1"));
  EXPECT_THAT(Message(Open().status()),
              AllOf(HasSubstr(Name(1)), HasSubstr("say file 2 of 3, its name says 1 of 3")));
  Write(1, GgufBuilder().Build());
  EXPECT_THAT(Message(Open().status()), HasSubstr("say file (none) of (none)"));
  Write(1, Part(1, 3, "t0"));
  EXPECT_THAT(Message(Open().status()), HasSubstr("tensor 't0': is also in"));
  Write(1, Part(1, 3, "t1"));
  Write(0, Part(0, 3, "t0", 7));
  EXPECT_THAT(Message(Open().status()), HasSubstr("is 7, the files hold 3"));
  Write(0, Part(0, 3, "t0"));
  std::filesystem::remove(dir_.path() / Name(2));
  EXPECT_THAT(Message(Open().status()), AllOf(HasSubstr(Name(2)), HasSubstr("is missing")));
  dir_.Write("other.gguf", Part(0, 3, "t0"));
  EXPECT_THAT(Message(GgufModel::Open(dir_.path() / "other.gguf").status()),
              HasSubstr("does not end in"));
}

TEST(FindGguf, TakesTheOnlyModelOfADirectory) {
  testing::TempDir dir;
  EXPECT_FALSE(FindGguf(dir.path())->has_value());
  EXPECT_EQ(*FindGguf("x/y.gguf"), "x/y.gguf");
  dir.Write("a.gguf", "");
  EXPECT_EQ(*FindGguf(dir.path()), (dir.path() / "a.gguf").string());
  dir.Write("b.gguf", "");
  EXPECT_THAT(Message(FindGguf(dir.path()).status()), HasSubstr("holds several models"));
  dir.Write("model.safetensors", "");
  EXPECT_FALSE(FindGguf(dir.path())->has_value());
}

}  // namespace
}  // namespace tandem
