// FP8 blocks against golden/quant bit for bit, plain dtypes, sub-ranges, trials QF-3 and RT-1.

#include "common/checkpoint/weight_matrix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/tensor/convert.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RawBytes;
using testing::SafetensorsBuilder;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::unique_ptr<Checkpoint> OpenBytes(const testing::TempDir& dir, const std::string& bytes) {
  dir.Write("model.safetensors", bytes);
  auto checkpoint = Checkpoint::Open(dir.path());
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return checkpoint.ok() ? *std::move(checkpoint) : nullptr;
}

struct GoldenCase {
  const char* name;
  int64_t rows, cols;
};

class GoldenFp8 : public ::testing::TestWithParam<GoldenCase> {
 protected:
  void SetUp() override {
    const auto path = testing::SharedPath("golden/quant/fp8_block.safetensors");
    if (!path) GTEST_SKIP() << "no golden/quant/fp8_block.safetensors";
    checkpoint_ = OpenBytes(dir_, testing::ReadWholeFile(*path));
    ASSERT_NE(checkpoint_, nullptr);
    const auto [name, rows, cols] = GetParam();
    auto matrix = WeightMatrix::Create(*checkpoint_, std::string(name) + ".weight", rows, cols, {});
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    matrix_ = *matrix;
    expected_.resize(rows * cols);
    ASSERT_TRUE(checkpoint_->ReadF32(std::string(name) + ".expected", expected_).ok());
  }

  testing::TempDir dir_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::optional<WeightMatrix> matrix_;
  std::vector<float> expected_;
};

TEST_P(GoldenFp8, DecodesBitForBit) {
  const auto [name, rows, cols] = GetParam();
  std::vector<float> out(rows * cols);
  ASSERT_TRUE(matrix_->ReadF32({0, rows}, {0, cols}, out).ok());
  EXPECT_EQ(std::memcmp(out.data(), expected_.data(), out.size() * sizeof(float)), 0);
  EXPECT_EQ(matrix_->format(), WeightFormat::kFp8);
  EXPECT_EQ(matrix_->native_dtype(), DType::kF32);
}

TEST_P(GoldenFp8, SubRangesCutThroughBlocks) {
  const auto [name, rows, cols] = GetParam();
  const Range row_range{rows / 3, rows - 1}, col_range{cols / 2 - 3, cols - 5};
  std::vector<float> out(row_range.size() * col_range.size());
  ASSERT_TRUE(matrix_->ReadF32(row_range, col_range, out).ok());
  for (int64_t r = 0; r < row_range.size(); ++r) {
    for (int64_t c = 0; c < col_range.size(); ++c) {
      ASSERT_EQ(out[r * col_range.size() + c],
                expected_[(row_range.begin + r) * cols + col_range.begin + c]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GoldenFp8,
                         ::testing::Values(GoldenCase{"ragged", 200, 272},
                                           GoldenCase{"small", 96, 160},
                                           GoldenCase{"square", 128, 256},
                                           GoldenCase{"v4", 136, 160}),
                         [](const auto& info) { return std::string(info.param.name); });

std::string Fp8Bytes(const std::string& codes, float scale) {
  return SafetensorsBuilder()
      .Add("w.weight", "F8_E4M3", {1, static_cast<int64_t>(codes.size())}, codes)
      .Add("w.weight_scale_inv", "F32", {1, (static_cast<int64_t>(codes.size()) + 127) / 128},
           RawBytes(std::vector<float>((codes.size() + 127) / 128, scale)))
      .Build();
}

TEST(WeightMatrix, Trial_QF_3_NanCodesAreRefusedAndTheRestIsExact) {
  std::string codes, finite;
  for (int code = 0; code < 256; ++code) {
    codes += static_cast<char>(code);
    if (!IsNanE4m3(static_cast<uint8_t>(code))) finite += static_cast<char>(code);
  }
  testing::TempDir dir;
  const auto with_nan = OpenBytes(dir, Fp8Bytes(codes, 1));
  const auto matrix = WeightMatrix::Create(*with_nan, "w.weight", 1, 256, {});
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  std::vector<float> out(256);
  const std::string error = Message(matrix->ReadF32({0, 1}, {0, 256}, out));
  EXPECT_THAT(error, HasSubstr("model.safetensors: tensor 'w.weight'"));
  EXPECT_THAT(error, HasSubstr("element [0,127] holds a NaN code"));

  testing::TempDir other;
  const auto without = OpenBytes(other, Fp8Bytes(finite, 1));
  const auto good = WeightMatrix::Create(*without, "w.weight", 1, 254, {});
  ASSERT_TRUE(good.ok()) << good.status();
  out.resize(254);
  ASSERT_TRUE(good->ReadF32({0, 1}, {0, 254}, out).ok());
  for (size_t i = 0; i < finite.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(out[i]),
              std::bit_cast<uint32_t>(DecodeE4m3(static_cast<uint8_t>(finite[i]))));
  }
}

TEST(WeightMatrix, Trial_RT_1_NanScaleIsRefusedByName) {
  testing::TempDir dir;
  const auto checkpoint = OpenBytes(dir, Fp8Bytes(std::string(4, '\x38'), std::nanf("")));
  const auto matrix = WeightMatrix::Create(*checkpoint, "w.weight", 1, 4, {});
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  std::vector<float> out(4);
  EXPECT_THAT(Message(matrix->ReadF32({0, 1}, {0, 4}, out)),
              HasSubstr("tensor 'w.weight_scale_inv': element [0,0] is not a finite number"));
}

TEST(WeightMatrix, ReadsPlainTypes) {
  testing::TempDir dir;
  const auto checkpoint =
      OpenBytes(dir, SafetensorsBuilder()
                         .Add("odd", "U8", {1}, "x")  // what follows is unaligned
                         .Add("f32", "F32", {2, 2}, RawBytes<float>({1, 2, 3, 1.00390625f}))
                         .Add("f16", "F16", {1, 2}, RawBytes<uint16_t>({0x3c00, 0xc000}))
                         .Add("bf16", "BF16", {1, 2}, RawBytes<uint16_t>({0x3f80, 0x7f80}))
                         .Build());
  const auto f32 = WeightMatrix::Create(*checkpoint, "f32", 2, 2, {});
  std::vector<float> out(2);
  ASSERT_TRUE(f32->ReadF32({0, 2}, {1, 2}, out).ok());
  EXPECT_THAT(out, ElementsAre(2, 1.00390625f));
  std::vector<uint16_t> narrow(2);
  ASSERT_TRUE(f32->ReadBf16({0, 2}, {1, 2}, narrow).ok());
  EXPECT_THAT(narrow, ElementsAre(0x4000, 0x3f80));  // a tie goes to the even code
  const auto f16 = WeightMatrix::Create(*checkpoint, "f16", 1, 2, {});
  EXPECT_EQ(f16->native_dtype(), DType::kF32);
  ASSERT_TRUE(f16->ReadF32({0, 1}, {0, 2}, out).ok());
  EXPECT_THAT(out, ElementsAre(1, -2));
  const auto bf16 = WeightMatrix::Create(*checkpoint, "bf16", 1, 2, {});
  EXPECT_EQ(bf16->native_dtype(), DType::kBF16);
  EXPECT_THAT(Message(bf16->ReadBf16({0, 1}, {0, 2}, narrow)), HasSubstr("element [0,1]"));
  EXPECT_THAT(Message(bf16->ReadF32({0, 1}, {0, 2}, out)), HasSubstr("element [0,1]"));
  EXPECT_THAT(Message(bf16->ReadF32({0, 1}, {0, 3}, out)), HasSubstr("do not fit [1,2]"));
  EXPECT_THAT(Message(bf16->ReadF32({-1, 1}, {0, 1}, out)), HasSubstr("do not fit [1,2]"));
  EXPECT_THAT(Message(WeightMatrix::Create(*checkpoint, "odd", 1, 1, {}).status()),
              HasSubstr("shape is [1], expected [1,1]"));
}

TEST(WeightMatrix, RefusesFp8WithoutMatchingScales) {
  testing::TempDir dir;
  const auto checkpoint =
      OpenBytes(dir, SafetensorsBuilder()
                         .Add("a.weight", "F8_E4M3", {1, 2}, "xx")
                         .Add("b.weight", "F8_E4M3", {1, 2}, "xx")
                         .Add("b.weight_scale_inv", "F32", {1, 2}, RawBytes<float>({1, 1}))
                         .Add("c.weight", "I8", {1, 2}, "xx")
                         .Add("d.weight", "F8_E4M3", {1, 2}, "xx")
                         .Add("d.weight_scale_inv", "I32", {1, 1}, RawBytes<int32_t>({1}))
                         .Build());
  const auto error = [&](const char* name) {
    return Message(WeightMatrix::Create(*checkpoint, name, 1, 2, {}).status());
  };
  EXPECT_THAT(error("a.weight"), HasSubstr("needs 'a.weight_scale_inv' beside it"));
  EXPECT_THAT(error("b.weight"), HasSubstr("shape is [1,2], expected [1,1] for blocks of 128x128"));
  EXPECT_THAT(error("c.weight"), HasSubstr("needs 'c.weight_scale' beside it"));
  EXPECT_THAT(error("d.weight"), HasSubstr("dtype I32 is not supported for scales of FP8"));
  QuantScheme narrow;
  narrow.block = {128, 1};
  EXPECT_TRUE(WeightMatrix::Create(*checkpoint, "b.weight", 1, 2, narrow).ok());
}

}  // namespace
}  // namespace tandem
