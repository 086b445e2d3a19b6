#include "gpu_worker/backend_cpu/vector_table.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "common/hw/cpu_features.h"
#include "common/tensor/convert.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

std::vector<const VectorTable*> Tables() {
  std::vector<const VectorTable*> tables = {&kVectorRef};
  const CpuFeatures features = DetectCpuFeatures();
  if (features.avx2) tables.push_back(&kVectorAvx2);
  if (features.avx512) tables.push_back(&kVectorAvx512);
  return tables;
}

struct Shape {
  int queries, keys, dim;
};
constexpr Shape kShapes[] = {{1, 1, 1},   {1, 4, 16},  {3, 5, 7},    {4, 4, 64},   {5, 9, 17},
                             {8, 16, 80}, {7, 3, 130}, {32, 11, 96}, {2, 33, 576}, {6, 2, 15}};

struct Operands {
  std::vector<float> queries, keys;
  std::vector<uint16_t> keys_bf16;
  std::vector<const float*> query_pointers;

  Operands(const Shape& s, int stride, uint32_t seed)
      : queries(RandomVector(static_cast<size_t>(s.queries * s.dim), seed)),
        keys(RandomVector(static_cast<size_t>(s.keys * stride), seed + 1)),
        keys_bf16(keys.size()) {
    for (size_t i = 0; i < keys.size(); ++i) {
      keys_bf16[i] = F32ToBf16(keys[i]);
      keys[i] = Bf16ToF32(keys_bf16[i]);  // so that both types mean the same numbers
    }
    for (int q = 0; q < s.queries; ++q) query_pointers.push_back(queries.data() + q * s.dim);
  }
};

TEST(VectorTable, DotGivesTheSameBitsInEveryTableAndKeyType) {
  for (const Shape& s : kShapes) {
    const int stride = s.dim + 3;
    const Operands operands(s, stride, 11);
    DotCall call{};
    call.queries = operands.query_pointers.data();
    call.query_count = s.queries;
    call.key_stride = static_cast<size_t>(stride);
    call.key_count = s.keys;
    call.dim = s.dim;
    call.score_stride = static_cast<size_t>(s.keys + 1);
    const auto run = [&](void (*dot)(const DotCall&), const void* keys, bool accumulate) {
      std::vector<float> scores(static_cast<size_t>(s.queries * (s.keys + 1)), 0.5f);
      call.keys = keys;
      call.scores = scores.data();
      call.accumulate = accumulate;
      dot(call);
      return scores;
    };
    const std::vector<float> expected = run(kVectorRef.dot_f32, operands.keys.data(), false);
    for (int q = 0; q < s.queries; ++q) {
      double largest = 0;
      for (int j = 0; j < s.keys; ++j) {
        double exact = 0;
        for (int d = 0; d < s.dim; ++d) {
          exact += double{operands.queries[q * s.dim + d]} * operands.keys[j * stride + d];
        }
        largest = std::max(largest, std::abs(exact));
        EXPECT_NEAR(expected[q * (s.keys + 1) + j], exact, 1e-5 * std::sqrt(s.dim));
      }
      EXPECT_EQ(expected[q * (s.keys + 1) + s.keys], 0.5f) << "wrote past the last key";
    }
    const std::vector<float> added = run(kVectorRef.dot_f32, operands.keys.data(), true);
    EXPECT_EQ(added[0], 0.5f + expected[0]);
    for (const VectorTable* table : Tables()) {
      ExpectSameBits(run(table->dot_f32, operands.keys.data(), false), expected);
      ExpectSameBits(run(table->dot_bf16, operands.keys_bf16.data(), false), expected);
      ExpectSameBits(run(table->dot_f32, operands.keys.data(), true), added);
    }
  }
}

TEST(VectorTable, MixGivesTheSameBitsInEveryTableAndKeyType) {
  for (const Shape& s : kShapes) {
    const int stride = s.dim + 5;
    const Operands operands(s, stride, 21);
    const std::vector<float> weights =
        RandomVector(static_cast<size_t>(s.queries * (s.keys + 2)), 31);
    MixCall call{};
    call.weights = weights.data();
    call.weight_stride = static_cast<size_t>(s.keys + 2);
    call.query_count = s.queries;
    call.value_stride = static_cast<size_t>(stride);
    call.key_count = s.keys;
    call.dim = s.dim;
    const auto run = [&](void (*mix)(const MixCall&), const void* values) {
      std::vector<float> out(static_cast<size_t>(s.queries * (s.dim + 1)), 0.25f);
      std::vector<float*> rows;
      for (int q = 0; q < s.queries; ++q) rows.push_back(out.data() + q * (s.dim + 1));
      call.values = values;
      call.outputs = rows.data();
      mix(call);
      return out;
    };
    std::vector<float> expected(static_cast<size_t>(s.queries * (s.dim + 1)), 0.25f);
    for (int q = 0; q < s.queries; ++q) {
      for (int j = 0; j < s.keys; ++j) {
        for (int d = 0; d < s.dim; ++d) {
          float& out = expected[q * (s.dim + 1) + d];
          out = std::fma(weights[q * (s.keys + 2) + j], operands.keys[j * stride + d], out);
        }
      }
    }
    for (const VectorTable* table : Tables()) {
      ExpectSameBits(run(table->mix_f32, operands.keys.data()), expected);
      ExpectSameBits(run(table->mix_bf16, operands.keys_bf16.data()), expected);
    }
  }
}

TEST(VectorTable, SumsAndMaximaAreTheSameInEveryTable) {
  for (const size_t n : {0u, 1u, 15u, 16u, 17u, 31u, 33u, 100u, 4097u}) {
    const std::vector<float> x = RandomVector(n, 41);
    double sum = 0, squares = 0;
    float largest = -std::numeric_limits<float>::infinity();
    for (const float value : x) {
      sum += value;
      squares += double{value} * value;
      largest = std::max(largest, value);
    }
    for (const VectorTable* table : Tables()) {
      EXPECT_EQ(table->sum(x.data(), n), kVectorRef.sum(x.data(), n));
      EXPECT_EQ(table->sum_squares(x.data(), n), kVectorRef.sum_squares(x.data(), n));
      EXPECT_NEAR(table->sum(x.data(), n), sum, 1e-10);
      EXPECT_NEAR(table->sum_squares(x.data(), n), squares, 1e-10);
      EXPECT_EQ(table->max(x.data(), n), largest);
      std::vector<float> scaled = x;
      const float scaled_max = table->scale_max(scaled.data(), n, 0.3f);
      EXPECT_EQ(scaled_max, n == 0 ? largest : largest * 0.3f);
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(scaled[i], x[i] * 0.3f);
      table->subtract(scaled.data(), n, 0.7f);
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(scaled[i], x[i] * 0.3f - 0.7f);
    }
  }
}

}  // namespace
}  // namespace tandem::gpu
