// Values of codes in runs of groups, and which groups are usable. What the values are: the golden
// cases of quant_golden_test and gguf_blocks_test.

#include "common/checkpoint/decode.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

namespace tandem {
namespace {

constexpr unsigned kSeed = 20;

std::vector<WeightFormat> QuantizedFormats() {
  std::vector<WeightFormat> formats;
  for (int i = 0; i < static_cast<int>(WeightFormat::kCount); ++i) {
    const auto format = static_cast<WeightFormat>(i);
    if (!IsPlain(format)) formats.push_back(format);
  }
  return formats;
}

// Random bits in the fields' widths; zero points and minima small as the formats say.
GroupParameters RandomGroup(WeightFormat format, std::mt19937& random) {
  const auto bits = static_cast<uint32_t>(random());
  const auto other = static_cast<uint32_t>(random());
  switch (format) {
    case WeightFormat::kFp8:
    case WeightFormat::kInt8F32:
    case WeightFormat::kInt4F32:
      return {.scale = bits};
    case WeightFormat::kInt4ZeroF32:
    case WeightFormat::kInt8ZeroF32:
      return {.scale = bits, .min = other & 0xff};
    case WeightFormat::kMxfp8:
    case WeightFormat::kMxfp4:
      return {.scale = bits & 0xff};
    case WeightFormat::kNvfp4:
      return {.scale = bits & 0xff, .super = other};
    case WeightFormat::kInt4ZeroBf16:
    case WeightFormat::kInt4ZeroF16:
    case WeightFormat::kInt8ZeroBf16:
    case WeightFormat::kInt8ZeroF16:
      return {.scale = bits & 0xffff, .min = other & 0xff};
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_1:
      return {.scale = bits & 0xffff, .min = other & 0xffff};
    case WeightFormat::kQ2K:
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
      return {.scale = bits & 0xf, .min = (bits >> 8) & 0xf, .super = other};
    case WeightFormat::kQ3K:
    case WeightFormat::kQ6K:
    case WeightFormat::kIq4Xs:
      return {.scale = bits & 0xff, .super = other & 0xffff};
    default:
      return {.scale = bits & 0xffff};
  }
}

TEST(Decode, AUsableGroupIsOneWithoutNonFiniteValues) {
  std::mt19937 random(kSeed);
  for (const WeightFormat format : QuantizedFormats()) {
    int usable = 0;
    for (int i = 0; i < 2000; ++i) {
      const GroupParameters group = RandomGroup(format, random);
      bool finite = true;
      for (int code = 0; code < CodeCount(format); ++code) {
        const auto byte = static_cast<uint8_t>(code);
        if (FindNanCode(format, &byte, 1)) continue;
        finite = finite && std::isfinite(DecodeWeight(format, byte, group));
      }
      usable += finite;
      ASSERT_EQ(IsUsableGroup(format, group), finite)
          << static_cast<int>(format) << ": " << std::hex << group.scale << " " << group.min << " "
          << group.super << ", seed " << kSeed;
    }
    EXPECT_GT(usable, 1000) << static_cast<int>(format);
    EXPECT_LT(usable, 2000) << static_cast<int>(format);
  }
}

TEST(Decode, RunsOfGroupsMatchOneCodeAtATime) {
  std::mt19937 random(kSeed);
  constexpr uint32_t kColumns = 32;
  for (const WeightFormat format : QuantizedFormats()) {
    std::vector<uint8_t> codes(100);
    std::vector<GroupParameters> groups(5);
    for (uint8_t& code : codes) {
      code = static_cast<uint8_t>(random() % static_cast<unsigned>(CodeCount(format)));
    }
    for (GroupParameters& group : groups) group = RandomGroup(format, random);
    for (const int64_t first : {0, 7, 31, 32, 63}) {
      std::vector<float> values(codes.size());
      DecodeWeights(format, codes.data(), 100, groups.data(), kColumns, first, values.data());
      for (int64_t i = 0; i < 100; ++i) {
        const auto at = static_cast<size_t>(i);
        const auto group = static_cast<size_t>((first + i) / kColumns - first / kColumns);
        const float want = DecodeWeight(format, codes[at], groups[group]);
        if (std::isnan(want)) {
          EXPECT_TRUE(std::isnan(values[at]));
        } else {
          EXPECT_EQ(std::bit_cast<uint32_t>(values[at]), std::bit_cast<uint32_t>(want));
        }
      }
    }
  }
}

TEST(Decode, FindsTheFirstNanCode) {
  std::vector<uint8_t> codes(10000, 0x7e);
  EXPECT_FALSE(FindNanCode(WeightFormat::kFp8, codes.data(), 10000).has_value());
  codes[9000] = 0xff;
  EXPECT_EQ(FindNanCode(WeightFormat::kMxfp8, codes.data(), 10000), 9000);
  codes[5] = 0x7f;
  EXPECT_EQ(FindNanCode(WeightFormat::kFp8, codes.data(), 10000), 5);
  EXPECT_FALSE(FindNanCode(WeightFormat::kInt8F16, codes.data(), 10000).has_value());
}

}  // namespace
}  // namespace tandem
