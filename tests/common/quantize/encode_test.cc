#include "common/quantize/encode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "common/checkpoint/decode.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

struct Case {
  const char* name;
  EncodeTarget target;
  // Root of the squared error over that of normally distributed weights, with groups of `cols`
  // columns: measured on this test's weights, rounded up.
  double most_loss;
};

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {"int8_channel", {WeightFormat::kInt8Bf16, 0, 1}, 0.0085},
      {"int8_g32", {WeightFormat::kInt8Bf16, 32, 1}, 0.0060},
      {"int4_g32", {WeightFormat::kInt4Bf16, 32, 1}, 0.090},
      {"int4_g64", {WeightFormat::kInt4Bf16, 64, 1}, 0.096},
      {"int4_g128", {WeightFormat::kInt4Bf16, 128, 1}, 0.104},
      {"int4_channel", {WeightFormat::kInt4Bf16, 0, 1}, 0.12},
      {"int4_asym_g32", {WeightFormat::kInt4ZeroBf16, 32, 1}, 0.081},
      {"int4_asym_g128", {WeightFormat::kInt4ZeroBf16, 128, 1}, 0.104},
      {"fp8_channel", {WeightFormat::kFp8, 0, 1}, 0.0270},
      {"fp8_block", {WeightFormat::kFp8, 128, 128}, 0.0270},
      {"mxfp4", {WeightFormat::kMxfp4, 32, 1}, 0.116},
  };
  return cases;
}

std::vector<float> NormalWeights(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// What was encoded, decoded by the one definition of the formats.
struct Encoded {
  std::vector<uint8_t> codes;
  std::vector<GroupParameters> groups;
  std::vector<float> decoded;
  EncodeLoss loss;
};

Encoded EncodeAndDecode(const std::vector<float>& values, int64_t rows, int64_t cols,
                        const EncodeTarget& target, ScaleSearch search) {
  const size_t groups_in_row = GroupsInRow(cols, target);
  Encoded out;
  out.codes.resize(values.size());
  out.groups.resize(static_cast<size_t>(rows) * groups_in_row);
  out.decoded.resize(values.size());
  const auto loss =
      Encode(values.data(), rows, cols, target, search, out.codes.data(), out.groups.data());
  EXPECT_TRUE(loss.ok()) << loss.status();
  out.loss = loss.value_or(EncodeLoss{});
  for (int64_t row = 0; row < rows; ++row) {
    DecodeWeights(target.format, out.codes.data() + row * cols, cols,
                  out.groups.data() + row * groups_in_row, target.group_columns, 0,
                  out.decoded.data() + row * cols);
  }
  return out;
}

double SquaredError(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum;
}

class EncodeTest : public ::testing::TestWithParam<Case> {};

TEST_P(EncodeTest, LossOfNormalWeightsIsBoundedAndReportedAsDecodingFindsIt) {
  constexpr int64_t kRows = 256, kCols = 512;
  const auto values = NormalWeights(kRows * kCols, 1);
  const Encoded out =
      EncodeAndDecode(values, kRows, kCols, GetParam().target, ScaleSearch::kLeastSquares);
  const double error = SquaredError(values, out.decoded);
  EXPECT_NEAR(out.loss.squared_error, error, 1e-4 * error);
  EXPECT_LE(out.loss.Relative(), GetParam().most_loss);
  EXPECT_GE(out.loss.Relative(), 0.5 * GetParam().most_loss) << "the bound says nothing";
}

TEST_P(EncodeTest, SearchIsNeverWorseThanTheLargestMagnitudeAlone) {
  // Several distributions: normal, heavy tails, one outlier a group, all of one sign.
  constexpr int64_t kRows = 8, kCols = 256;
  std::mt19937 random(7);
  for (int kind = 0; kind < 4; ++kind) {
    auto values = NormalWeights(kRows * kCols, 10 + kind);
    for (size_t i = 0; i < values.size(); ++i) {
      if (kind == 1) values[i] = values[i] * values[i] * values[i] * 1e4f;
      if (kind == 2 && i % 32 == 5) values[i] *= 20;
      if (kind == 3) values[i] = std::abs(values[i]) + 0.01f;
    }
    // Row by row: a sum over groups could hide one that became worse.
    for (int64_t row = 0; row < kRows; ++row) {
      const std::vector<float> one(values.begin() + row * kCols,
                                   values.begin() + (row + 1) * kCols);
      const Encoded plain = EncodeAndDecode(one, 1, kCols, GetParam().target, ScaleSearch::kNone);
      const Encoded best =
          EncodeAndDecode(one, 1, kCols, GetParam().target, ScaleSearch::kLeastSquares);
      EXPECT_LE(best.loss.squared_error, plain.loss.squared_error) << "kind " << kind;
    }
  }
}

TEST_P(EncodeTest, RaggedEdgesAreEncodedLikeWholeGroups) {
  // 201 columns and 130 rows: the last group of a row and the last block of rows are short.
  constexpr int64_t kRows = 130, kCols = 201;
  const auto values = NormalWeights(kRows * kCols, 3);
  const Encoded out =
      EncodeAndDecode(values, kRows, kCols, GetParam().target, ScaleSearch::kLeastSquares);
  EXPECT_LE(out.loss.Relative(), 1.1 * GetParam().most_loss);
  double last = 0, last_weights = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const size_t i = static_cast<size_t>((row + 1) * kCols - 1);
    last += (values[i] - out.decoded[i]) * (values[i] - out.decoded[i]);
    last_weights += values[i] * values[i];
  }
  EXPECT_LE(std::sqrt(last / last_weights), 1.5 * GetParam().most_loss) << "of the last column";
}

TEST_P(EncodeTest, ZerosAndNegativeZerosStayZeroWithAUsableScale) {
  constexpr int64_t kRows = 3, kCols = 64;
  std::vector<float> values(kRows * kCols, 0.0f);
  for (size_t i = 0; i < values.size(); i += 3) values[i] = -0.0f;
  const Encoded out =
      EncodeAndDecode(values, kRows, kCols, GetParam().target, ScaleSearch::kLeastSquares);
  for (const float value : out.decoded) EXPECT_EQ(value, 0.0f);
  for (const GroupParameters& group : out.groups) {
    EXPECT_TRUE(IsUsableGroup(GetParam().target.format, group));
  }
  EXPECT_EQ(out.loss.squared_error, 0);
}

TEST_P(EncodeTest, TinyAndHugeWeightsGiveFiniteValues) {
  for (const float scale : {1e-38f, 1e-30f, 1e-10f, 1e10f, 0x1p47f}) {
    constexpr int64_t kRows = 2, kCols = 64;
    auto values = NormalWeights(kRows * kCols, 5);
    for (float& value : values) value = std::clamp(value * 50, -7.0f, 7.0f) * scale;
    const Encoded out =
        EncodeAndDecode(values, kRows, kCols, GetParam().target, ScaleSearch::kLeastSquares);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(std::isfinite(out.decoded[i])) << scale;
      ASSERT_LE(std::abs(out.decoded[i] - values[i]), 8 * scale) << scale;
    }
    for (const GroupParameters& group : out.groups) {
      EXPECT_TRUE(IsUsableGroup(GetParam().target.format, group)) << scale;
    }
  }
}

TEST_P(EncodeTest, NanInfinityAndWeightsBeyondTheLimitAreRefusedByPlace) {
  constexpr int64_t kRows = 4, kCols = 64;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity(), 2 * kMaxWeight}) {
    auto values = NormalWeights(kRows * kCols, 6);
    values[2 * kCols + 17] = bad;
    std::vector<uint8_t> codes(values.size());
    std::vector<GroupParameters> groups(values.size());
    const auto loss = Encode(values.data(), kRows, kCols, GetParam().target,
                             ScaleSearch::kLeastSquares, codes.data(), groups.data());
    ASSERT_FALSE(loss.ok());
    EXPECT_EQ(loss.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(loss.status().message().find("[2,17]"), std::string::npos) << loss.status();
  }
}

TEST_P(EncodeTest, ValuesThatTheFormatHoldsComeBackExactly) {
  // Decode every code under one scale; encoding the values must lose nothing.
  const WeightFormat format = GetParam().target.format;
  GroupParameters group;
  group.scale = format == WeightFormat::kFp8     ? std::bit_cast<uint32_t>(0.125f)
                : format == WeightFormat::kMxfp4 ? 127 - 3
                                                 : F32ToBf16(0.125f);
  group.min = format == WeightFormat::kInt4ZeroBf16 ? 5 : 0;
  constexpr int64_t kCols = 256;
  std::vector<float> values(kCols);
  for (int64_t i = 0; i < kCols; ++i) {
    auto code = static_cast<uint8_t>(i % CodeCount(format));
    if (format == WeightFormat::kFp8 && IsNanE4m3(code)) code = 0;
    // A symmetric integer range has one code more below zero; a plain scale does not use it.
    if (format == WeightFormat::kInt8Bf16 && code == 0x80) code = 0;
    if (format == WeightFormat::kInt4Bf16 && code == 0) code = 8;
    // The largest magnitude gives the scale, so every group must hold the largest code.
    if (format == WeightFormat::kInt8Bf16 && i % 32 == 0) code = 127;
    values[static_cast<size_t>(i)] = DecodeWeight(format, code, group);
  }
  const Encoded out =
      EncodeAndDecode(values, 1, kCols, GetParam().target, ScaleSearch::kLeastSquares);
  EXPECT_EQ(out.decoded, values);
}

INSTANTIATE_TEST_SUITE_P(Formats, EncodeTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

TEST(Encode, BlocksShareOneScaleOverTheirRows) {
  constexpr int64_t kRows = 200, kCols = 272;
  const auto values = NormalWeights(kRows * kCols, 8);
  const EncodeTarget target = {WeightFormat::kFp8, 128, 128};
  const Encoded out = EncodeAndDecode(values, kRows, kCols, target, ScaleSearch::kLeastSquares);
  ASSERT_EQ(GroupsInRow(kCols, target), 3u);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t group = 0; group < 3; ++group) {
      EXPECT_EQ(out.groups[row * 3 + group].scale, out.groups[row / 128 * 128 * 3 + group].scale);
    }
  }
  EXPECT_NE(out.groups[0].scale, out.groups[128 * 3].scale);
}

TEST(Encode, Fp8RoundsToTheNearestCodeOverItsWholeRange) {
  // Against a search of the table: every binade, subnormals and ties included.
  std::vector<float> values;
  for (int code = 0; code < 0x7e; ++code) {
    const float low = kE4m3ToF32[code], high = kE4m3ToF32[code + 1];
    for (const float part : {0.0f, 0.25f, 0.5f, 0.75f}) {
      values.push_back(low + part * (high - low));
      values.push_back(-values.back());
    }
  }
  values.push_back(448);
  std::vector<uint8_t> codes(values.size());
  std::vector<GroupParameters> groups(1);
  // The largest is 448: a plain scale of 1.
  ASSERT_TRUE(Encode(values.data(), 1, static_cast<int64_t>(values.size()),
                     {WeightFormat::kFp8, 0, 1}, ScaleSearch::kNone, codes.data(), groups.data())
                  .ok());
  ASSERT_EQ(groups[0].scale, std::bit_cast<uint32_t>(1.0f));
  for (size_t i = 0; i < values.size(); ++i) {
    const float got = kE4m3ToF32[codes[i]];
    float nearest = std::numeric_limits<float>::infinity();
    for (int code = 0; code < 256; ++code) {
      if (IsNanE4m3(static_cast<uint8_t>(code))) continue;
      nearest = std::min(nearest, std::abs(kE4m3ToF32[code] - values[i]));
    }
    EXPECT_EQ(std::abs(got - values[i]), nearest) << values[i];
    if (std::abs(values[i]) > 0 &&
        std::abs(got - values[i]) * 2 ==
            std::abs(kE4m3ToF32[(codes[i] ^ 1) & 0x7f] - std::abs(got))) {
      EXPECT_EQ(codes[i] % 2, 0) << "ties go to the even code: " << values[i];
    }
  }
}

}  // namespace
}  // namespace tandem
