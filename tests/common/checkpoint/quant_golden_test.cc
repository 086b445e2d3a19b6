// Every case of golden/quant's safetensors files: whole matrices and random rectangles, as values
// and as codes with parameters, against the expected values.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/checkpoint/decode.h"
#include "common/checkpoint/weight_matrix.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using F = WeightFormat;

QuantScheme Scheme(QuantMethod method, std::vector<QuantizedWeights> weights = {},
                   bool zero_minus_one = true) {
  QuantScheme scheme;
  scheme.method = method;
  scheme.weights = std::move(weights);
  scheme.zero_minus_one = zero_minus_one;
  return scheme;
}

QuantScheme Ct(int bits, int64_t group, bool symmetric = true) {
  return Scheme(QuantMethod::kCompressedTensors, {{bits, group, symmetric}});
}
QuantScheme Awq(int64_t group) { return Scheme(QuantMethod::kAwq, {{4, group, false}}); }
QuantScheme Gptq(int bits, int64_t group, bool symmetric, bool zero_minus_one = true) {
  return Scheme(QuantMethod::kGptq, {{bits, group, symmetric}}, zero_minus_one);
}

struct Case {
  const char* file;
  const char* name;  // of the case: its module
  int64_t rows, cols;
  QuantScheme scheme;
  WeightFormat format;
  uint32_t group_columns;
  double tolerance = 0;  // relative; 0: bit for bit
  FusedRows fused = {};
  // Where not name.weight and name.expected: the tensors' names, and the first value expected.
  const char* weight = nullptr;
  const char* expected = nullptr;
  int64_t expected_first = 0;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.file << "/" << c.name; }

const QuantScheme kFp8 = Scheme(QuantMethod::kFp8);
const QuantScheme kMx4 = Scheme(QuantMethod::kMxfp4);
constexpr const char* kGateUp = "model.layers.0.mlp.experts.gate_up_proj";
constexpr const char* kDown = "model.layers.0.mlp.experts.down_proj";
constexpr double kThreeFactors = 2e-7;

// Expert `e` of mxfp4_gpt_oss: 32 gate and 32 up rows alternate; down has 96 rows.
Case OssGate(const char* name, int64_t e) {
  return {"mxfp4_gpt_oss", name,       32, 96, kMx4, F::kMxfp4, 32, 0, {e * 64, 2}, kGateUp,
          "expected.gate", e * 32 * 96};
}
Case OssUp(const char* name, int64_t e) {
  return {"mxfp4_gpt_oss", name,          32,         96, kMx4, F::kMxfp4, 32, 0, {e * 64 + 1, 2},
          kGateUp,         "expected.up", e * 32 * 96};
}
Case OssDown(const char* name, int64_t e) {
  return {"mxfp4_gpt_oss", name,       96, 32, kMx4, F::kMxfp4, 32, 0, {e * 96, 1}, kDown,
          "expected.down", e * 96 * 32};
}

std::vector<Case> Cases() {
  return {
      {"fp8_block", "ragged", 200, 272, kFp8, F::kFp8, 128},
      {"fp8_block", "small", 96, 160, kFp8, F::kFp8, 128},
      {"fp8_block", "square", 128, 256, kFp8, F::kFp8, 128},
      {"fp8_block", "v4", 136, 160, kFp8, F::kFp8, 128},
      {"fp8_channel", "channel_f32", 96, 160, kFp8, F::kFp8, 0},
      {"fp8_channel", "channel_bf16", 96, 160, kFp8, F::kFp8, 0},
      {"fp8_channel", "tensor", 64, 96, kFp8, F::kFp8, 0},
      {"fp8_channel", "tensor_1d", 64, 96, kFp8, F::kFp8, 0},
      {"mxfp8", "m3", 96, 160, Scheme(QuantMethod::kMxfp8), F::kMxfp8, 32},
      {"ct_int4", "g32_sym", 96, 160, Ct(4, 32), F::kInt4Bf16, 32},
      {"ct_int4", "g32_asym", 100, 160, Ct(4, 32, false), F::kInt4ZeroBf16, 32},
      {"ct_int4", "g128_sym", 64, 256, Ct(4, 128), F::kInt4Bf16, 128},
      {"ct_int4", "channel_sym", 48, 96, Ct(4, 0), F::kInt4Bf16, 0},
      {"ct_int4", "int8_g32_packed", 48, 96, Ct(8, 32), F::kInt8Bf16, 32},
      {"ct_int8", "channel", 96, 160, Ct(8, 0), F::kInt8Bf16, 0},
      {"awq_int4", "g128", 72, 256, Awq(128), F::kInt4ZeroF16, 128},
      {"awq_int4", "g32", 64, 96, Awq(32), F::kInt4ZeroF16, 32},
      {"gptq_int4", "v1_sym", 48, 256, Gptq(4, 128, true), F::kInt4F16, 128},
      {"gptq_int4", "v1_asym", 64, 256, Gptq(4, 128, false), F::kInt4ZeroF16, 128},
      {"gptq_int4", "v2_asym", 64, 256, Gptq(4, 128, false, false), F::kInt4ZeroF16, 128},
      {"gptq_int4", "v1_desc_act", 48, 256, Gptq(4, 64, true), F::kF32, 0},
      {"gptq_int4", "v1_g_all", 64, 96, Gptq(4, 0, false), F::kInt4ZeroF16, 0},
      {"gptq_int4", "v1_int8_sym", 32, 64, Gptq(8, 32, true), F::kInt8F16, 32},
      {"mxfp4", "ct", 96, 160, Ct(4, 32), F::kMxfp4, 32},
      {"mxfp4", "v4", 96, 160, kFp8, F::kMxfp4, 32},
      {"nvfp4", "ct", 96, 160, Ct(4, 16), F::kNvfp4, 16, kThreeFactors},
      {"nvfp4", "ct_pow2", 96, 160, Ct(4, 16), F::kNvfp4, 16, kThreeFactors},
      {"nvfp4", "modelopt", 96, 160, Scheme(QuantMethod::kModelOpt), F::kNvfp4, 16, kThreeFactors},
      OssGate("gate0", 0),
      OssGate("gate2", 2),
      OssUp("up0", 0),
      OssUp("up1", 1),
      OssDown("down0", 0),
      OssDown("down2", 2),
  };
}

class QuantGolden : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    const auto path = testing::SharedPath(std::string("golden/quant/") + c.file + ".safetensors");
    if (!path) GTEST_SKIP() << "no golden/quant/" << c.file << ".safetensors";
    std::filesystem::create_symlink(*path, dir_.path() / "model.safetensors");
    auto checkpoint = Checkpoint::Open(dir_.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
    const std::string name = c.weight != nullptr ? c.weight : c.name + std::string(".weight");
    auto matrix = WeightMatrix::Create(*checkpoint_, name, c.rows, c.cols, c.scheme, c.fused);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    matrix_ = std::make_unique<WeightMatrix>(*std::move(matrix));
    const std::string want = c.expected != nullptr ? c.expected : c.name + std::string(".expected");
    const auto tensor = checkpoint_->Get(want);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    expected_.resize(static_cast<size_t>((*tensor)->view.Elements()));
    ASSERT_TRUE(checkpoint_->ReadF32(want, expected_).ok());
  }

  void Check(Range rows, Range cols, const std::vector<float>& got) const {
    const Case& c = GetParam();
    size_t at = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      for (int64_t col = cols.begin; col < cols.end; ++col) {
        const float want = expected_[static_cast<size_t>(c.expected_first + row * c.cols + col)];
        const float value = got[at++];
        if (c.tolerance > 0) {
          ASSERT_LE(std::abs(double{value} - want), c.tolerance * std::abs(double{want}))
              << row << "," << col << ": " << value << ", expected " << want;
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(value), std::bit_cast<uint32_t>(want))
              << row << "," << col << ": " << value << ", expected " << want;
        }
      }
    }
  }

  // The rectangle by codes and parameters, or by elements of a plain format.
  std::vector<float> ByParts(Range rows, Range cols) const {
    std::vector<float> values(static_cast<size_t>(rows.size() * cols.size()));
    if (matrix_->format() == WeightFormat::kF32) {
      EXPECT_TRUE(matrix_->ReadElements(rows, cols, values.data()).ok());
      return values;
    }
    const uint32_t touched =
        GroupsTouched(static_cast<uint32_t>(cols.begin), static_cast<uint32_t>(cols.end),
                      matrix_->group_columns());
    std::vector<uint8_t> codes(values.size());
    std::vector<GroupParameters> groups(static_cast<size_t>(rows.size()) * touched);
    const absl::Status status = matrix_->ReadCodes(rows, cols, codes.data(), groups.data());
    EXPECT_TRUE(status.ok()) << status;
    for (int64_t row = 0; row < rows.size(); ++row) {
      for (int64_t col = 0; col < cols.size(); ++col) {
        // One code at a time, its group found by absolute column as QuantizedView says.
        const uint32_t columns = matrix_->group_columns();
        const int64_t group =
            columns == 0 ? 0 : (cols.begin + col) / columns - cols.begin / columns;
        const auto at = static_cast<size_t>(row * cols.size() + col);
        EXPECT_LT(codes[at], CodeCount(matrix_->format()));
        values[at] = DecodeWeight(matrix_->format(), codes[at],
                                  groups[static_cast<size_t>(row * touched + group)]);
      }
    }
    return values;
  }

  testing::TempDir dir_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<WeightMatrix> matrix_;
  std::vector<float> expected_;
};

TEST_P(QuantGolden, WholeMatrixIsExact) {
  const Case& c = GetParam();
  EXPECT_EQ(matrix_->format(), c.format);
  EXPECT_EQ(matrix_->group_columns(), c.group_columns);
  const Range rows{0, c.rows}, cols{0, c.cols};
  std::vector<float> got(static_cast<size_t>(c.rows * c.cols));
  ASSERT_TRUE(matrix_->ReadF32(rows, cols, got).ok());
  Check(rows, cols, got);
  Check(rows, cols, ByParts(rows, cols));
}

TEST_P(QuantGolden, AnyRectangleIsExact) {
  const Case& c = GetParam();
  constexpr unsigned kSeed = 4711;
  std::mt19937 random(kSeed);
  const auto range = [&random](int64_t size) {
    const auto pick = [&](int64_t n) {
      return std::uniform_int_distribution<int64_t>(0, n)(random);
    };
    const int64_t begin = pick(size - 1);
    return Range{begin, begin + pick(size - begin)};
  };
  for (int i = 0; i < 40; ++i) {
    const Range rows = range(c.rows), cols = range(c.cols);
    SCOPED_TRACE(::testing::Message() << "rows " << rows.begin << "-" << rows.end << ", columns "
                                      << cols.begin << "-" << cols.end << ", seed " << kSeed);
    std::vector<float> got(static_cast<size_t>(rows.size() * cols.size()));
    ASSERT_TRUE(matrix_->ReadF32(rows, cols, got).ok());
    Check(rows, cols, got);
    Check(rows, cols, ByParts(rows, cols));
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, QuantGolden, ::testing::ValuesIn(Cases()), [](const auto& info) {
  return std::string(info.param.file) + "_" + info.param.name;
});

}  // namespace
}  // namespace tandem
