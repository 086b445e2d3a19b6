#include "common/tensor/convert.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

class LinearTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, LinearTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

std::vector<double> Reference(const std::vector<float>& x, const std::vector<float>& w,
                              const std::vector<float>& bias, int rows, int n, int k) {
  std::vector<double> y(static_cast<size_t>(rows) * n);
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < n; ++o) {
      double sum = bias.empty() ? 0.0 : bias[o];
      for (int j = 0; j < k; ++j) sum += double{x[r * k + j]} * w[o * k + j];
      y[r * n + o] = sum;
    }
  }
  return y;
}

std::vector<float> RoundedToBf16(std::vector<float> w) {
  for (float& value : w) value = Bf16ToF32(F32ToBf16(value));
  return w;
}

std::vector<float> Apply(Backend& backend, const LinearWeight& weight, const std::vector<float>& x,
                         const std::vector<float>& bias, int rows) {
  std::vector<float> y(static_cast<size_t>(rows * weight.n), -1.0f);
  LinearArgs args;
  args.rows.bound = rows;
  args.weight = &weight;
  args.bias = bias.empty() ? nullptr : bias.data();
  args.x = AsMatrix(x, weight.k);
  args.y = AsMatrix(y, weight.n);
  backend.Linear(args);
  return y;
}

TEST_P(LinearTest, MatchesTheReferenceOverOddShapes) {
  struct Shape {
    int rows, n, k;
  };
  for (const Shape& s : {Shape{1, 1, 1}, Shape{3, 31, 7}, Shape{1, 32, 64}, Shape{2, 33, 65},
                         Shape{17, 100, 48}, Shape{5, 257, 129}, Shape{64, 8, 200}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::vector<float> x = RandomVector(static_cast<size_t>(s.rows * s.k), 1);
      std::vector<float> w = RandomVector(static_cast<size_t>(s.n * s.k), 2);
      if (dtype == DType::kBF16) w = RoundedToBf16(w);
      const std::vector<float> bias = RandomVector(static_cast<size_t>(s.n), 3);
      const auto weight = MakeLinear(*backend_, w, s.n, s.k, dtype);
      EXPECT_EQ(weight->n, s.n);
      EXPECT_EQ(weight->k, s.k);
      ExpectClose(Apply(*backend_, *weight, x, bias, s.rows),
                  Reference(x, w, bias, s.rows, s.n, s.k), 2e-6);
      ExpectClose(Apply(*backend_, *weight, x, {}, s.rows), Reference(x, w, {}, s.rows, s.n, s.k),
                  2e-6);
    }
  }
}

TEST_P(LinearTest, RowsDoNotDependOnTheBatch) {
  const int n = 70, k = 90, rows = 13;
  const std::vector<float> x = RandomVector(rows * k, 4);
  const auto weight = MakeLinear(*backend_, RandomVector(n * k, 5), n, k);
  const std::vector<float> together = Apply(*backend_, *weight, x, {}, rows);
  for (int r = 0; r < rows; ++r) {
    const std::vector<float> one(x.begin() + r * k, x.begin() + (r + 1) * k);
    ExpectSameBits(Apply(*backend_, *weight, one, {}, 1),
                   {together.begin() + r * n, together.begin() + (r + 1) * n});
  }
}

TEST_P(LinearTest, GivesTheBitsOfTheScalarKernels) {
  auto ref = MakeBackend({1, Isa::kRef});
  const int n = 200, k = 333, rows = 9;
  const std::vector<float> x = RandomVector(rows * k, 6);
  const std::vector<float> w = RandomVector(n * k, 7);
  const std::vector<float> bias = RandomVector(n, 8);
  ExpectSameBits(Apply(*backend_, *MakeLinear(*backend_, w, n, k), x, bias, rows),
                 Apply(*ref, *MakeLinear(*ref, w, n, k), x, bias, rows));
}

TEST_P(LinearTest, ReadsTheRowCountWhenItRuns) {
  const int n = 40, k = 16;
  const auto weight = MakeLinear(*backend_, RandomVector(n * k, 9), n, k);
  const std::vector<float> x = RandomVector(4 * k, 10);
  std::vector<float> y(4 * n, -1.0f);
  const int32_t count = 2;
  LinearArgs args;
  args.rows = {.bound = 4, .count = &count};
  args.weight = weight.get();
  args.x = AsMatrix(x, k);
  args.y = AsMatrix(y, n);
  backend_->Linear(args);
  EXPECT_NE(y[n], -1.0f);
  for (size_t i = 2 * n; i < y.size(); ++i) ASSERT_EQ(y[i], -1.0f);
}

TEST_P(LinearTest, HeadLinearAppliesEachHeadsMatrix) {
  const int heads = 5, n = 37, k = 24, rows = 6, gap = 3;
  const int64_t x_ld = heads * (k + gap);
  const int64_t y_ld = heads * n;
  const std::vector<float> x = RandomVector(rows * x_ld, 11);
  std::vector<std::unique_ptr<LinearWeight>> weights;
  std::vector<std::vector<float>> matrices;
  for (int h = 0; h < heads; ++h) {
    matrices.push_back(RandomVector(n * k, 100 + h));
    weights.push_back(MakeLinear(*backend_, matrices.back(), n, k));
  }
  std::vector<float> y(rows * y_ld);
  HeadLinearArgs args;
  args.rows.bound = rows;
  args.weights = weights.data();
  args.heads = heads;
  args.x = AsMatrix(x, x_ld);
  args.x_head_stride = k + gap;
  args.y = AsMatrix(y, y_ld);
  args.y_head_stride = n;
  backend_->HeadLinear(args);
  std::vector<double> expected(y.size());
  for (int r = 0; r < rows; ++r) {
    for (int h = 0; h < heads; ++h) {
      for (int o = 0; o < n; ++o) {
        double sum = 0;
        for (int j = 0; j < k; ++j) {
          sum += double{x[r * x_ld + h * (k + gap) + j]} * matrices[h][o * k + j];
        }
        expected[r * y_ld + h * n + o] = sum;
      }
    }
  }
  ExpectClose(y, expected, 2e-6);
}

TEST(LoadLinear, RefusesWhatCannotBePacked) {
  auto backend = MakeBackend();
  MatrixSource source;
  source.n = 4;
  source.k = 0;
  source.read = [](int64_t, int64_t, void*) { return absl::OkStatus(); };
  EXPECT_EQ(backend->LoadLinear(source).status().code(), absl::StatusCode::kInvalidArgument);
  source.k = 4;
  source.dtype = DType::kF8E4M3;
  EXPECT_EQ(backend->LoadLinear(source).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LoadLinear, PassesOnTheSourcesError) {
  auto backend = MakeBackend({.threads = 2});
  MatrixSource source;
  source.n = 5000;
  source.k = 1000;
  source.read = [](int64_t begin, int64_t end, void* out) -> absl::Status {
    if (begin > 2000) return absl::DataLossError("tensor 'w' holds NaN");
    std::fill_n(static_cast<float*>(out), (end - begin) * 1000, 1.0f);
    return absl::OkStatus();
  };
  const absl::Status status = backend->LoadLinear(source).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "tensor 'w' holds NaN");
}

}  // namespace
}  // namespace tandem::gpu
