// Narrow floats against their definitions, exhaustively where the type has few codes.

#include "common/tensor/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "common/tensor/dtype.h"
#include "tests/testing/shared_data.h"

namespace tandem {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(DType, NamesGoBothWays) {
  for (const char* name : {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64",
                           "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}) {
    const auto dtype = DTypeFromName(name);
    ASSERT_TRUE(dtype.has_value()) << name;
    EXPECT_EQ(DTypeName(*dtype), name);
    EXPECT_GE(DTypeBytes(*dtype), 1u);
  }
  EXPECT_FALSE(DTypeFromName("F4").has_value());
  EXPECT_FALSE(DTypeFromName("bf16").has_value());
}

// The nearest of all finite codes, ties to the even code: the definition, by search.
template <typename Decode>
uint16_t NearestCode(float value, Decode decode) {
  uint16_t best = 0;
  for (uint32_t code = 0; code < 0x8000u; ++code) {
    const float candidate = decode(static_cast<uint16_t>(code));
    if (!std::isfinite(candidate)) break;
    const double distance = std::abs(double{candidate} - value);
    const double best_distance = std::abs(double{decode(best)} - value);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best;
}

TEST(Convert, Bf16RoundsToNearestEven) {
  for (float value : {0.0f, 1.0f, 1.00390625f, 1.01171875f, 3.1415927f, 1e-40f, 0x1p-133f, 6e4f}) {
    EXPECT_EQ(F32ToBf16(value), NearestCode(value, Bf16ToF32)) << value;
    EXPECT_EQ(F32ToBf16(-value), NearestCode(value, Bf16ToF32) | 0x8000u) << value;
  }
  EXPECT_EQ(F32ToBf16(std::numeric_limits<float>::max()), 0x7f80u);  // rounds to infinity
  EXPECT_TRUE(std::isnan(Bf16ToF32(F32ToBf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(Convert, Bf16KeepsEveryCode) {
  for (uint32_t code = 0; code <= 0xffff; ++code) {
    const float value = Bf16ToF32(static_cast<uint16_t>(code));
    if (std::isnan(value)) continue;
    EXPECT_EQ(F32ToBf16(value), code);
  }
}

TEST(Convert, F16KeepsEveryCodeAndMatchesItsDefinition) {
  for (uint32_t code = 0; code <= 0xffff; ++code) {
    const float value = F16ToF32(static_cast<uint16_t>(code));
    const uint32_t exponent = (code >> 10) & 31;
    const double mantissa = code & 0x3ff;
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), mantissa != 0);
      if (mantissa != 0) continue;
    } else {
      const double magnitude = exponent == 0
                                   ? std::ldexp(mantissa, -24)
                                   : std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25);
      EXPECT_EQ(std::abs(value), magnitude);
      EXPECT_EQ(std::signbit(value), code >= 0x8000);
    }
    EXPECT_EQ(F32ToF16(value), code);
  }
}

TEST(Convert, F16RoundsToNearestEven) {
  for (float value : {1.0004883f, 1.0014648f, 0.1f, 65504.0f, 65519.0f, 6.1e-5f, 6.09e-5f, 3e-8f,
                      2.9802322e-8f, 2.98e-8f, 5.9604645e-8f, 8.940697e-8f}) {
    EXPECT_EQ(F32ToF16(value), NearestCode(value, F16ToF32)) << value;
  }
  EXPECT_EQ(F32ToF16(65520.0f), 0x7c00u);
  EXPECT_EQ(F32ToF16(-kInf), 0xfc00u);
}

TEST(Convert, E8m0IsAPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(E8m0ToF32(static_cast<uint8_t>(code)), std::ldexp(1.0, code - 127));
  }
  EXPECT_TRUE(std::isnan(E8m0ToF32(255)));
}

TEST(Convert, Trial_QF_3_E4m3MatchesTheTable) {
  const auto path = testing::SharedPath("trials/e4m3_table.json");
  if (!path) GTEST_SKIP() << "no trials/e4m3_table.json";
  const auto values = nlohmann::json::parse(testing::ReadWholeFile(*path))["values"];
  ASSERT_EQ(values.size(), 256u);
  for (int code = 0; code < 256; ++code) {
    const float decoded = kE4m3ToF32[code];
    if (values[code].is_null()) {
      EXPECT_TRUE(std::isnan(decoded)) << code;
      continue;
    }
    EXPECT_EQ(decoded, values[code].get<float>()) << code;
    EXPECT_EQ(std::signbit(decoded), code >= 128) << code;
  }
}

TEST(Convert, BulkFormsTakeUnalignedData) {
  const uint16_t codes[] = {0x3f80, 0xc000, 0x0000};  // 1, -2, 0 in BF16
  std::vector<unsigned char> bytes(1 + sizeof(codes));
  std::memcpy(bytes.data() + 1, codes, sizeof(codes));
  float out[3];
  ConvertToF32(DType::kBF16, bytes.data() + 1, 3, out);
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], -2.0f);
  ConvertF32ToBf16(out, 3, bytes.data() + 1);
  EXPECT_EQ(std::memcmp(bytes.data() + 1, codes, sizeof(codes)), 0);
  EXPECT_FALSE(IsFloatConvertible(DType::kI32));
  EXPECT_TRUE(IsFloatConvertible(DType::kF8E4M3));
}

TEST(Convert, FindsTheFirstNonFinite) {
  std::vector<float> values(1000, 1.0f);
  EXPECT_FALSE(FindNonFinite(values.data(), 1000).has_value());
  values[777] = std::nanf("");
  EXPECT_EQ(FindNonFinite(values.data(), 1000), 777);
  values[513] = -kInf;
  EXPECT_EQ(FindNonFinite(values.data(), 1000), 513);
  std::vector<uint16_t> narrow(1000);
  ConvertF32ToBf16(values.data(), 1000, narrow.data());
  EXPECT_EQ(FindNonFiniteBf16(narrow.data(), 1000), 513);
  EXPECT_FALSE(FindNonFiniteBf16(narrow.data(), 513).has_value());
}

}  // namespace
}  // namespace tandem
