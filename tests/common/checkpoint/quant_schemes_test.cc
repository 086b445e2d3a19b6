// What the golden cases of the quantization schemes cannot show: contents and shapes that are
// refused by name, layouts that no WeightFormat describes, trials QF-1 and QF-9.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "common/checkpoint/weight_matrix.h"
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

// A checkpoint in a directory of its own.
class Model {
 public:
  explicit Model(const SafetensorsBuilder& builder) {
    dir_.Write("model.safetensors", builder.Build());
    auto checkpoint = Checkpoint::Open(dir_.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
  }
  absl::StatusOr<WeightMatrix> Open(int64_t rows, int64_t cols, const QuantScheme& scheme,
                                    FusedRows fused = {}) const {
    return WeightMatrix::Create(*checkpoint_, "w.weight", rows, cols, scheme, fused);
  }

 private:
  testing::TempDir dir_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

std::vector<float> Whole(const absl::StatusOr<WeightMatrix>& matrix) {
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  if (!matrix.ok()) return {};
  std::vector<float> out(static_cast<size_t>(matrix->rows() * matrix->cols()));
  const absl::Status status = matrix->ReadF32({0, matrix->rows()}, {0, matrix->cols()}, out);
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

std::string ReadError(const absl::StatusOr<WeightMatrix>& matrix) {
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  if (!matrix.ok()) return "";
  std::vector<float> out(static_cast<size_t>(matrix->rows() * matrix->cols()));
  return Message(matrix->ReadF32({0, matrix->rows()}, {0, matrix->cols()}, out));
}

QuantScheme Integers(QuantMethod method, QuantizedWeights weights) {
  QuantScheme scheme;
  scheme.method = method;
  scheme.weights = {weights};
  return scheme;
}
QuantScheme Ct(int bits, int64_t group, bool symmetric = true) {
  return Integers(QuantMethod::kCompressedTensors, {bits, group, symmetric});
}
QuantScheme Gptq(int bits, int64_t group, bool symmetric) {
  return Integers(QuantMethod::kGptq, {bits, group, symmetric});
}

constexpr uint16_t kOne = 0x3c00, kHalf = 0x3800, kF16Nan = 0x7e00;  // F16

// GPTQ, 8 inputs and 8 outputs in groups of 4: every code of output n is n, every zero nibble
// `zero`.
SafetensorsBuilder GptqModel(uint32_t zero, const std::vector<int32_t>& g_idx = {},
                             uint16_t second_scale = kHalf) {
  std::vector<uint32_t> codes;
  for (uint32_t n = 0; n < 8; ++n) codes.push_back(n * 0x11111111u);
  std::vector<uint16_t> scales(8, kOne);
  scales.insert(scales.end(), 8, second_scale);
  SafetensorsBuilder builder;
  builder.Add("w.qweight", "I32", {1, 8}, RawBytes(codes))
      .Add("w.qzeros", "I32", {2, 1}, RawBytes(std::vector<uint32_t>(2, zero * 0x11111111u)))
      .Add("w.scales", "F16", {2, 8}, RawBytes(scales));
  if (!g_idx.empty()) builder.Add("w.g_idx", "I32", {8}, RawBytes(g_idx));
  return builder;
}

TEST(QuantSchemes, Trial_QF_9_ZeroPointsAtTheEndsOfTheirRange) {
  // GPTQ v1 stores zero points less one: nibble 15 is the zero point 16.
  const auto high = Whole(Model(GptqModel(15)).Open(8, 8, Gptq(4, 4, false)));
  for (size_t n = 0; n < 8; ++n) {
    EXPECT_EQ(high.at(n * 8), static_cast<float>(n) - 16);
    EXPECT_EQ(high.at(n * 8 + 7), (static_cast<float>(n) - 16) * 0.5f);
  }
  // AWQ stores them as they are: nibble 0 is the zero point 0. Output p[i] is nibble i of a word.
  SafetensorsBuilder awq;
  awq.Add("w.qweight", "I32", {2, 1}, RawBytes<uint32_t>({0x76543210u, 0xfedcba98u}))
      .Add("w.qzeros", "I32", {1, 1}, RawBytes<uint32_t>({0}))
      .Add("w.scales", "F16", {1, 8}, RawBytes(std::vector<uint16_t>(8, kHalf)));
  const Model awq_model(awq);
  const auto matrix = awq_model.Open(8, 2, Integers(QuantMethod::kAwq, {4, 2, false}));
  const auto low = Whole(matrix);
  std::vector<float> column(8);  // whole words of one input
  ASSERT_TRUE(matrix->ReadF32({0, 8}, {1, 2}, column).ok());
  constexpr int kOutputs[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(low.at(static_cast<size_t>(kOutputs[i]) * 2), static_cast<float>(i) * 0.5f);
    EXPECT_EQ(low.at(static_cast<size_t>(kOutputs[i]) * 2 + 1), static_cast<float>(i + 8) * 0.5f);
    EXPECT_EQ(column.at(static_cast<size_t>(kOutputs[i])), static_cast<float>(i + 8) * 0.5f);
  }
}

TEST(QuantSchemes, Trial_QF_1_BlocksComeFromTheConfigNotFromTheShapes) {
  const auto path = testing::SharedPath("golden/quant/fp8_block.safetensors");
  if (!path) GTEST_SKIP() << "no golden/quant/fp8_block.safetensors";
  testing::TempDir dir;
  dir.Write("model.safetensors", testing::ReadWholeFile(*path));
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  // 200 rows with two rows of scales: dividing would give blocks of 100.
  const auto matrix = WeightMatrix::Create(**checkpoint, "ragged.weight", 200, 272, {});
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  std::vector<float> scales(6);
  ASSERT_TRUE((*checkpoint)->ReadF32("ragged.weight_scale_inv", scales).ok());
  ASSERT_NE(scales[0], scales[3]);
  std::vector<uint8_t> codes(200);
  std::vector<GroupParameters> groups(200);
  ASSERT_TRUE(matrix->ReadCodes({0, 200}, {127, 128}, codes.data(), groups.data()).ok());
  for (size_t row = 0; row < 200; ++row) {
    EXPECT_EQ(std::bit_cast<float>(groups[row].scale), scales[row < 128 ? 0 : 3]) << row;
  }
  ASSERT_TRUE(matrix->ReadCodes({0, 200}, {256, 257}, codes.data(), groups.data()).ok());
  EXPECT_EQ(std::bit_cast<float>(groups[128].scale), scales[5]);
}

TEST(QuantSchemes, GptqSymmetricIsHeldToItsPromise) {
  const Model model(GptqModel(7));
  const auto good = model.Open(8, 8, Gptq(4, 4, true));
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->format(), WeightFormat::kInt4F16);
  EXPECT_EQ(Whole(good).at(3 * 8), -5);
  EXPECT_THAT(ReadError(Model(GptqModel(6)).Open(8, 8, Gptq(4, 4, true))),
              HasSubstr("tensor 'w.scales': element [0,0] has the zero point 7, but "
                        "quantization_config says that the weights are symmetric"));
}

TEST(QuantSchemes, GptqGroupIndexIsAPermutationOrARefusal) {
  const Model in_order(GptqModel(7, {0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(in_order.Open(8, 8, Gptq(4, 4, true))->format(), WeightFormat::kInt4F16);
  const Model mixed(GptqModel(7, {0, 1, 0, 1, 0, 1, 0, 1}));
  const auto matrix = mixed.Open(8, 8, Gptq(4, 4, true));
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  EXPECT_EQ(matrix->format(), WeightFormat::kF32);
  std::vector<float> row(3);
  ASSERT_TRUE(matrix->ReadF32({2, 3}, {1, 4}, row).ok());
  EXPECT_THAT(row, ElementsAre(-3, -6, -3));
  EXPECT_FALSE(matrix->ReadCodes({0, 1}, {0, 1}, nullptr, nullptr).ok());
  EXPECT_THAT(
      Message(Model(GptqModel(7, {0, 1, 0, 2, 0, 1, 0, 1})).Open(8, 8, Gptq(4, 4, true)).status()),
      HasSubstr("tensor 'w.g_idx': element [3] is group 2 of 2"));
  EXPECT_THAT(
      ReadError(
          Model(GptqModel(7, {0, 1, 0, 1, 0, 1, 0, 1}, kF16Nan)).Open(8, 8, Gptq(4, 4, true))),
      HasSubstr("tensor 'w.scales': element [1,0] is not a finite number"));
}

TEST(QuantSchemes, GptqEightBitsWithZeroPoints) {
  SafetensorsBuilder builder;
  builder.Add("w.qweight", "I32", {1, 4}, RawBytes<uint32_t>({0xff000180u, 0, 0, 0}))
      .Add("w.qzeros", "I32", {1, 1}, RawBytes<uint32_t>({0x7f7f7fffu}))
      .Add("w.scales", "F16", {1, 4}, RawBytes(std::vector<uint16_t>(4, kOne)));
  const Model model(builder);
  const auto matrix = model.Open(4, 4, Gptq(8, 0, false));
  const std::vector<float> values = Whole(matrix);
  EXPECT_EQ(matrix->format(), WeightFormat::kF32);
  // Zero point 256 for output 0, 128 for the others.
  EXPECT_THAT(std::vector<float>(values.begin(), values.begin() + 5),
              ElementsAre(128 - 256, 1 - 256, -256, 255 - 256, -128));
  QuantScheme as_they_are = Gptq(8, 0, false);
  as_they_are.zero_minus_one = false;
  const auto second_version = model.Open(4, 4, as_they_are);
  const std::vector<float> others = Whole(second_version);
  EXPECT_EQ(second_version->format(), WeightFormat::kInt8ZeroF16);
  EXPECT_THAT(std::vector<float>(others.begin(), others.begin() + 5),
              ElementsAre(128 - 255, 1 - 255, -255, 0, -127));
}

TEST(QuantSchemes, IntQuantizedGroupsAndZeroPoints) {
  SafetensorsBuilder builder;
  builder.Add("w.weight", "I8", {2, 4}, RawBytes<int8_t>({-128, 127, 1, -1, 0, 5, 6, 7}))
      .Add("w.weight_scale", "F32", {2, 2}, RawBytes<float>({1, 2, 3, 4}));
  const Model symmetric(builder);
  const auto matrix = symmetric.Open(2, 4, Ct(8, 2));
  EXPECT_THAT(Whole(matrix), ElementsAre(-128, 127, 2, -2, 0, 15, 24, 28));
  EXPECT_EQ(matrix->format(), WeightFormat::kInt8F32);
  EXPECT_THAT(Message(symmetric.Open(2, 4, Ct(8, 2, false)).status()),
              HasSubstr("its zero points are missing"));
  EXPECT_THAT(Message(symmetric.Open(2, 4, Ct(8, 4)).status()),
              HasSubstr("fits no config group of quantization_config"));
  builder.Add("w.weight_zero_point", "I8", {2, 2}, RawBytes<int8_t>({-128, 127, 1, -1}));
  const Model asymmetric(builder);
  const auto with_zero = asymmetric.Open(2, 4, Ct(8, 2, false));
  EXPECT_THAT(Whole(with_zero), ElementsAre(0, 255, (1 - 127) * 2, (-1 - 127) * 2, -3, 12, 28, 32));
  EXPECT_EQ(with_zero->format(), WeightFormat::kInt8ZeroF32);
  // Codes and zero points as the packed store takes them: unsigned.
  std::vector<uint8_t> codes(4);
  std::vector<GroupParameters> groups(2);
  ASSERT_TRUE(with_zero->ReadCodes({1, 2}, {0, 4}, codes.data(), groups.data()).ok());
  EXPECT_THAT(codes, ElementsAre(128, 133, 134, 135));
  EXPECT_EQ(groups[0].min, 129u);
  EXPECT_EQ(groups[1].min, 127u);
}

TEST(QuantSchemes, PackedBytesWithZeroPointsAreUnsigned) {
  SafetensorsBuilder builder;
  builder.Add("w.weight_packed", "I32", {4, 1}, RawBytes<uint32_t>({0xff800100u, 0, 0, 0x01020304}))
      .Add("w.weight_scale", "F16", {4, 1}, RawBytes(std::vector<uint16_t>(4, kHalf)))
      .Add("w.weight_zero_point", "I32", {1, 1}, RawBytes<uint32_t>({0x03ff8000u}));
  const Model model(builder);
  const auto matrix = model.Open(4, 4, Ct(8, 0, false));
  EXPECT_THAT(Whole(matrix), ElementsAre(0, 0.5f, 64, 127.5f, -64, -64, -64, -64, -127.5f, -127.5f,
                                         -127.5f, -127.5f, 0.5f, 0, -0.5f, -1));
  EXPECT_EQ(matrix->format(), WeightFormat::kInt8ZeroF16);
  EXPECT_EQ(matrix->group_columns(), 0u);
}

TEST(QuantSchemes, ScalesOfRowsMayLackTheDimensionOfGroups) {
  SafetensorsBuilder builder;
  builder.Add("w.weight", "F8_E4M3", {2, 4}, std::string("\x38\x38\x38\x38\x40\x40\x40\x40"))
      .Add("w.weight_scale", "F32", {2}, RawBytes<float>({3, 5}));
  const Model fp8(builder);
  const auto matrix = fp8.Open(2, 4, {});
  EXPECT_THAT(Whole(matrix), ElementsAre(3, 3, 3, 3, 10, 10, 10, 10));
  EXPECT_EQ(matrix->format(), WeightFormat::kFp8);
  EXPECT_EQ(matrix->group_columns(), 0u);
  SafetensorsBuilder int8;
  int8.Add("w.weight", "I8", {2, 2}, RawBytes<int8_t>({-128, 127, 1, -1}))
      .Add("w.weight_scale", "F32", {2}, RawBytes<float>({1, 2}));
  EXPECT_THAT(Whole(Model(int8).Open(2, 2, Ct(8, 0))), ElementsAre(-128, 127, 2, -2));
  SafetensorsBuilder other;
  other.Add("w.weight", "F8_E4M3", {2, 4}, std::string(8, '\x38'))
      .Add("w.weight_scale", "F32", {3}, RawBytes<float>({1, 2, 3}));
  EXPECT_THAT(Message(Model(other).Open(2, 4, {}).status()),
              HasSubstr("tensor 'w.weight_scale': shape is [3], expected [1,1]"));
}

TEST(QuantSchemes, FusedExpertsHaveAScaleARow) {
  // Two experts, gate above up; [experts, rows, 1] and [experts, rows].
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 4, 1}, {2, 4}}) {
    SafetensorsBuilder builder;
    builder.Add("w.weight", "F8_E4M3", {2, 4, 1}, std::string(8, '\x38'))
        .Add("w.weight_scale", "F32", shape, RawBytes<float>({1, 2, 3, 4, 5, 6, 7, 8}));
    const Model model(builder);
    EXPECT_THAT(Whole(model.Open(2, 1, {}, {.base = 4, .step = 1})), ElementsAre(5, 6));
    EXPECT_THAT(Whole(model.Open(2, 1, {}, {.base = 1, .step = 2})), ElementsAre(2, 4));
  }
}

TEST(QuantSchemes, CompressedTensorsActOrder) {
  SafetensorsBuilder builder;
  builder.Add("w.weight_packed", "I32", {1, 1}, RawBytes<uint32_t>({0x98765432u}))
      .Add("w.weight_scale", "BF16", {1, 2}, RawBytes<uint16_t>({0x3f80, 0x4000}))
      .Add("w.weight_shape", "I64", {2}, RawBytes<int64_t>({1, 8}))
      .Add("w.weight_g_idx", "I32", {8}, RawBytes<int32_t>({1, 0, 1, 0, 1, 0, 1, 0}));
  const Model model(builder);
  EXPECT_THAT(Whole(model.Open(1, 8, Ct(4, 4))), ElementsAre(-12, -5, -8, -3, -4, -1, 0, 1));
}

TEST(QuantSchemes, ConfigGroupsAreToldApartByShapes) {
  SafetensorsBuilder builder;
  builder.Add("w.weight_packed", "I32", {1, 2}, RawBytes<uint32_t>({0x83828180u, 0}))
      .Add("w.weight_scale", "BF16", {1, 1}, RawBytes<uint16_t>({0x3f80}));
  const Model model(builder);
  QuantScheme scheme = Ct(4, 4);
  scheme.weights.push_back({8, 0, true});
  const auto matrix = model.Open(1, 8, scheme);
  EXPECT_THAT(Whole(matrix), ElementsAre(0, 1, 2, 3, -128, -128, -128, -128));
  EXPECT_EQ(matrix->format(), WeightFormat::kInt8Bf16);
  // Groups of any size that hold the whole row say the same.
  scheme.weights.push_back({8, 16, true});
  EXPECT_THAT(Whole(model.Open(1, 8, scheme)), ElementsAre(0, 1, 2, 3, -128, -128, -128, -128));
}

TEST(QuantSchemes, ConfigGroupsOfOtherSizesThatFitAlikeAreRefused) {
  SafetensorsBuilder builder;
  builder.Add("w.weight_packed", "I32", {1, 2}, RawBytes<uint32_t>({0x83828180u, 0}))
      .Add("w.weight_scale", "BF16", {1, 2}, RawBytes<uint16_t>({0x3f80, 0x3f80}));
  const Model model(builder);
  QuantScheme scheme = Ct(8, 4);
  scheme.weights.push_back({8, 5, true});  // 8 inputs are two groups of either size
  EXPECT_THAT(Message(model.Open(1, 8, scheme).status()), HasSubstr("fits two config groups"));
}

TEST(QuantSchemes, StoredShapeMustAgree) {
  SafetensorsBuilder builder;
  builder.Add("w.weight_packed", "I32", {1, 1}, RawBytes<uint32_t>({0}))
      .Add("w.weight_scale", "BF16", {1, 1}, RawBytes<uint16_t>({0x3f80}))
      .Add("w.weight_shape", "I64", {2}, RawBytes<int64_t>({1, 7}));
  EXPECT_THAT(Message(Model(builder).Open(1, 8, Ct(4, 0)).status()),
              HasSubstr("tensor 'w.weight_shape': holds [1,7], expected [1,8]"));
}

TEST(QuantSchemes, NanScalesOfEveryTypeAreRefusedByName) {
  SafetensorsBuilder mxfp4;
  mxfp4.Add("w.weight_packed", "U8", {1, 32}, std::string(32, '\x22'))
      .Add("w.weight_scale", "U8", {1, 2}, std::string("\x7f\xff"));
  EXPECT_THAT(ReadError(Model(mxfp4).Open(1, 64, Ct(4, 32))),
              HasSubstr("tensor 'w.weight_scale': element [0,1] is not a finite number"));
  SafetensorsBuilder nvfp4;
  nvfp4.Add("w.weight", "U8", {1, 16}, std::string(16, '\x22'))
      .Add("w.weight_scale", "F8_E4M3", {1, 2}, std::string("\x38\x7f"))
      .Add("w.weight_scale_2", "F32", {}, RawBytes<float>({1}));
  EXPECT_THAT(ReadError(Model(nvfp4).Open(1, 32, {})),
              HasSubstr("tensor 'w.weight_scale': element [0,1] is not a finite number"));
  SafetensorsBuilder global;
  global.Add("w.weight_packed", "U8", {1, 8}, std::string(8, '\x22'))
      .Add("w.weight_scale", "F8_E4M3", {1, 1}, std::string("\x38"))
      .Add("w.weight_global_scale", "F32", {1}, RawBytes<float>({0}));
  EXPECT_THAT(Message(Model(global).Open(1, 16, {}).status()),
              HasSubstr("tensor 'w.weight_global_scale': the global scale is not a finite"));
  SafetensorsBuilder overflow;
  overflow.Add("w.weight", "F8_E4M3", {1, 1}, "\x7e")
      .Add("w.weight_scale", "F32", {1, 1}, RawBytes<float>({3e38f}));
  EXPECT_THAT(ReadError(Model(overflow).Open(1, 1, {})), HasSubstr("of usable size"));
}

TEST(QuantSchemes, FusedExpertsStayInsideTheirTensor) {
  SafetensorsBuilder builder;
  builder.Add("w.weight", "BF16", {2, 4, 1},
              RawBytes<uint16_t>({0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100}));
  const Model model(builder);
  EXPECT_THAT(Whole(model.Open(2, 1, {}, {.base = 1, .step = 2})), ElementsAre(2, 4));
  EXPECT_THAT(Whole(model.Open(4, 1, {}, {.base = 4, .step = 1})), ElementsAre(5, 6, 7, 8));
  EXPECT_EQ(model.Open(2, 1, {}, {.base = 1, .step = 2})->stored_bytes(), 4u);
  for (const FusedRows bad : {FusedRows{2, 2}, FusedRows{8, 1}, FusedRows{-1, 1}, FusedRows{0, -1},
                              FusedRows{0, int64_t{1} << 62}, FusedRows{5, 1}}) {
    EXPECT_THAT(Message(model.Open(4, 1, {}, bad).status()), HasSubstr("has no 4 rows"))
        << bad.base << " " << bad.step;
  }
}

TEST(QuantSchemes, ShapesOfEveryPartAreChecked) {
  const auto gptq = [](std::vector<int64_t> qzeros, const std::string& data) {
    SafetensorsBuilder builder;
    builder.Add("w.qweight", "I32", {1, 8}, std::string(32, '\0'))
        .Add("w.qzeros", "I32", qzeros, data)
        .Add("w.scales", "F16", {1, 8}, std::string(16, '\0'));
    return Message(Model(builder).Open(8, 8, Gptq(4, 0, false)).status());
  };
  EXPECT_THAT(gptq({2, 1}, std::string(8, '\0')),
              HasSubstr("tensor 'w.qzeros': shape is [2,1], expected [1,1]"));
  EXPECT_THAT(gptq({1, 1}, std::string(4, '\0')), ::testing::IsEmpty());
  SafetensorsBuilder builder;
  builder.Add("w.qweight", "I32", {1, 8}, std::string(32, '\0'));
  EXPECT_THAT(Message(Model(builder).Open(8, 8, {}).status()),
              HasSubstr("needs a quantization_config whose quant_method is 'awq' or 'gptq'"));
  EXPECT_THAT(Message(Model(builder).Open(8, 8, Gptq(4, 0, false)).status()),
              HasSubstr("'w.qzeros'"));
  EXPECT_THAT(Message(Model(builder).Open(8, 8, Gptq(3, 0, false)).status()),
              HasSubstr("weights of 3 bits"));
}

}  // namespace
}  // namespace tandem
