// Every block type against the values that the gguf package decodes (golden/quant/gguf), whole and
// in random rectangles; experts by slice; rows in pairs.

#include "common/checkpoint/gguf_blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "common/checkpoint/gguf_names.h"
#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/tensor/convert.h"
#include "tests/testing/gguf_builder.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using testing::SharedPath;

// Types whose value is one product of two exactly decoded factors.
bool IsExact(GgufType type) {
  switch (type) {
    case GgufType::kF32:
    case GgufType::kF16:
    case GgufType::kBf16:
    case GgufType::kQ4_0:
    case GgufType::kQ5_0:
    case GgufType::kQ8_0:
    case GgufType::kIq4Nl:
    case GgufType::kMxfp4:
      return true;
    default:
      return false;
  }
}

Checkpoint::Tensor TensorOf(const GgufTensor& from, int64_t expert = 0) {
  Checkpoint::Tensor tensor;
  tensor.name = from.name;
  tensor.file = from.file;
  tensor.gguf = &from;
  tensor.gguf_first_row = from.rank == 3 ? expert * from.shape[1] : 0;
  tensor.view.rank = 2;
  tensor.view.shape = {from.shape[from.rank - 2], from.row_elements()};
  return tensor;
}

class GgufBlocks : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto gguf = SharedPath("golden/quant/gguf/all_types.gguf");
    const auto expected = SharedPath("golden/quant/gguf/expected.safetensors");
    if (!gguf || !expected) GTEST_SKIP() << "no golden/quant/gguf";
    auto model = GgufModel::Open(*gguf);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    auto file = SafetensorsFile::Open(*expected);
    ASSERT_TRUE(file.ok()) << file.status();
    expected_ = *std::move(file);
  }

  std::vector<float> Expected(std::string_view name) const {
    for (const SafetensorsEntry& entry : expected_->entries()) {
      if (entry.name != name) continue;
      const TensorView view = expected_->View(entry);
      std::vector<float> values(static_cast<size_t>(view.Elements()));
      ConvertToF32(view.dtype, view.data, view.Elements(), values.data());
      return values;
    }
    return {};
  }

  std::unique_ptr<GgufModel> model_;
  std::unique_ptr<SafetensorsFile> expected_;
};

WeightMatrix Open(const Checkpoint::Tensor& tensor) {
  auto source = OpenGgufMatrix(tensor, tensor.view.shape[0], tensor.view.shape[1]);
  EXPECT_TRUE(source.ok()) << source.status();
  return WeightMatrix(*std::move(source));
}

// Types with a subtraction lose digits where it cancels: 2e-7 of the larger term.
float Tolerance(const std::vector<float>& row) {
  float largest = 0;
  for (float value : row) largest = std::max(largest, std::abs(value));
  return 2e-7f * largest;
}

TEST_F(GgufBlocks, EveryTypeAndExpertEqualsTheReference) {
  for (const GgufTensor* from : model_->tensors()) {
    SCOPED_TRACE(std::string(from->name));
    const std::vector<float> expected = Expected(from->name);
    const int64_t rows = from->shape[from->rank - 2];
    const int64_t cols = from->row_elements();
    const int64_t experts = from->rank == 3 ? from->shape[0] : 1;
    ASSERT_EQ(expected.size(), static_cast<size_t>(experts * rows * cols));
    const float tolerance = IsExact(from->type->type) ? 0 : Tolerance(expected);
    for (int64_t expert = 0; expert < experts; ++expert) {
      const Checkpoint::Tensor tensor = TensorOf(*from, expert);
      const WeightMatrix matrix = Open(tensor);
      std::vector<float> values(static_cast<size_t>(rows * cols));
      const absl::Status status = matrix.ReadF32({0, rows}, {0, cols}, values);
      ASSERT_TRUE(status.ok()) << status;
      for (size_t i = 0; i < values.size(); ++i) {
        const float want = expected[static_cast<size_t>(expert * rows * cols) + i];
        ASSERT_LE(std::abs(values[i] - want), tolerance) << i << " " << want;
      }
      EXPECT_EQ(matrix.stored_bytes() * static_cast<uint64_t>(experts), from->bytes);
    }
  }
}

TEST_F(GgufBlocks, RectanglesEqualTheWholesParts) {
  std::mt19937 random(7);
  const auto range = [&random](int64_t size) {
    int64_t a = std::uniform_int_distribution<int64_t>(0, size)(random);
    int64_t b = std::uniform_int_distribution<int64_t>(0, size)(random);
    return Range{std::min(a, b), std::max(a, b)};
  };
  for (const GgufTensor* from : model_->tensors()) {
    SCOPED_TRACE(std::string(from->name));
    const Checkpoint::Tensor tensor = TensorOf(*from);
    const WeightMatrix matrix = Open(tensor);
    const int64_t rows = matrix.rows();
    const int64_t cols = matrix.cols();
    std::vector<float> whole(static_cast<size_t>(rows * cols));
    ASSERT_TRUE(matrix.ReadF32({0, rows}, {0, cols}, whole).ok());
    for (int trial = 0; trial < 50; ++trial) {
      const Range r = range(rows);
      const Range c = range(cols);
      std::vector<float> part(static_cast<size_t>(r.size() * c.size()));
      ASSERT_TRUE(matrix.ReadF32(r, c, part).ok());
      for (int64_t i = 0; i < r.size(); ++i) {
        for (int64_t j = 0; j < c.size(); ++j) {
          ASSERT_EQ(part[static_cast<size_t>(i * c.size() + j)],
                    whole[static_cast<size_t>((r.begin + i) * cols + c.begin + j)]);
        }
      }
    }
  }
}

TEST(GgufMatrix, ReadsRowsStoredInPairsInOrder) {
  // Two heads of 6 rows; row (t, j) of a head holds 10 * t + j, stored as the converter does.
  std::vector<float> stored;
  for (int head = 0; head < 2; ++head) {
    for (int j = 0; j < 3; ++j) {
      for (int t = 0; t < 2; ++t) stored.push_back(static_cast<float>(100 * head + 10 * t + j));
    }
  }
  testing::TempDir dir;
  const auto model = GgufModel::Open(dir.Write(
      "m.gguf", testing::GgufBuilder().Tensor("q", {12, 1}, 0, testing::RawBytes(stored)).Build()));
  ASSERT_TRUE(model.ok()) << model.status();
  Checkpoint::Tensor tensor = TensorOf(*(*model)->FindTensor("q"));
  tensor.gguf_paired_rows = 6;
  std::vector<float> rows(12);
  ASSERT_TRUE(Open(tensor).ReadF32({0, 12}, {0, 1}, rows).ok());
  EXPECT_THAT(rows, ::testing::ElementsAre(0, 1, 2, 10, 11, 12, 100, 101, 102, 110, 111, 112));
}

TEST(GgufMatrix, RefusesAnotherShapeAndNonFiniteScales) {
  testing::TempDir dir;
  std::string block(34, '\1');
  block[0] = '\0';
  block[1] = '\x7c';  // an infinite F16
  const auto model = GgufModel::Open(
      dir.Write("m.gguf", testing::GgufBuilder().Tensor("w", {1, 32}, 8, block).Build()));
  ASSERT_TRUE(model.ok()) << model.status();
  const Checkpoint::Tensor tensor = TensorOf(*(*model)->FindTensor("w"));
  EXPECT_THAT(std::string(OpenGgufMatrix(tensor, 32, 1).status().message()),
              HasSubstr("m.gguf: tensor 'w': shape is [1,32], expected [32,1]"));
  std::vector<float> values(32);
  EXPECT_THAT(std::string(Open(tensor).ReadF32({0, 1}, {0, 32}, values).message()),
              HasSubstr("tensor 'w': the scale of row 0, group 0"));
}

}  // namespace
}  // namespace tandem
