#include <cmath>

#include "common/tensor/convert.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

class ElementwiseTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, ElementwiseTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

TEST_P(ElementwiseTest, EmbedCopiesRowsAndPoisonsUnknownIds) {
  const int vocab = 11, hidden = 37;
  std::vector<float> table = RandomVector(vocab * hidden, 1);
  std::vector<uint16_t> bf16(table.size());
  ConvertF32ToBf16(table.data(), static_cast<int64_t>(table.size()), bf16.data());
  const std::vector<int32_t> ids = {3, -1, 10, 0, vocab};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<float> out(ids.size() * 40, 7.0f);
    EmbedArgs args;
    args.rows.bound = static_cast<int>(ids.size());
    args.table.data = dtype == DType::kF32 ? static_cast<void*>(table.data()) : bf16.data();
    args.table.dtype = dtype;
    args.table.rank = 2;
    args.table.shape = {vocab, hidden};
    args.ids = ids.data();
    args.out = AsMatrix(out, 40);
    backend_->Embed(args);
    for (size_t r = 0; r < ids.size(); ++r) {
      for (int i = 0; i < hidden; ++i) {
        if (ids[r] < 0 || ids[r] >= vocab) {
          ASSERT_TRUE(std::isnan(out[r * 40 + i]));
          continue;
        }
        const float value = table[ids[r] * hidden + i];
        ASSERT_EQ(out[r * 40 + i], dtype == DType::kF32 ? value : Bf16ToF32(F32ToBf16(value)));
      }
      EXPECT_EQ(out[r * 40 + hidden], 7.0f);
    }
  }
}

TEST_P(ElementwiseTest, RmsNormNormalizesEachGroup) {
  const int rows = 9, width = 65, groups = 3;
  const int64_t ld = width * groups + 5;
  std::vector<float> x = RandomVector(rows * ld, 2, 30.0f);
  std::fill_n(x.begin(), width, 0.0f);  // a vector of zeros stays so
  const std::vector<float> weight = RandomVector(width, 3);
  std::vector<double> expected(x.begin(), x.end());
  for (int r = 0; r < rows; ++r) {
    for (int g = 0; g < groups; ++g) {
      double sum = 0;
      for (int i = 0; i < width; ++i) sum += std::pow(double{x[r * ld + g * width + i]}, 2);
      const double scale = 1 / std::sqrt(sum / width + double{1e-5f});
      for (int i = 0; i < width; ++i) expected[r * ld + g * width + i] *= scale * weight[i];
    }
  }
  std::vector<float> out = x;
  RmsNormArgs args;
  args.rows.bound = rows;
  args.x = AsMatrix(x, ld);
  args.out = AsMatrix(out, ld);
  args.weight = weight.data();
  args.width = width;
  args.groups = groups;
  args.eps = 1e-5f;
  backend_->RmsNorm(args);
  ExpectClose(out, expected, 1e-6);
  args.out = AsMatrix(x, ld);  // in place
  backend_->RmsNorm(args);
  ExpectSameBits(x, out);
}

TEST_P(ElementwiseTest, SiluMulAddAndGatherFollowTheirFormulas) {
  const int rows = 70, width = 131;
  const std::vector<float> gate = RandomVector(rows * width, 4, 3.0f);
  const std::vector<float> up = RandomVector(rows * width, 5);
  std::vector<float> out(rows * width);
  backend_->SiluMul({.rows = {.bound = rows},
                     .gate = AsMatrix(gate, width),
                     .up = AsMatrix(up, width),
                     .out = AsMatrix(out, width),
                     .width = width});
  std::vector<double> expected(out.size());
  for (size_t i = 0; i < out.size(); ++i) {
    expected[i] = gate[i] / (1 + std::exp(-double{gate[i]})) * up[i];
  }
  ExpectClose(out, expected, 1e-6);

  std::vector<float> sum = gate;
  backend_->Add({.rows = {.bound = rows},
                 .x = AsMatrix(sum, width),
                 .y = AsMatrix(up, width),
                 .width = width});
  for (size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], gate[i] + up[i]);

  const std::vector<int32_t> indices = {69, 0, 5, 5};
  std::vector<float> gathered(indices.size() * width);
  GatherRowsArgs gather;
  gather.rows.bound = 4;
  gather.x = AsMatrix(gate, width);
  gather.indices = indices.data();
  gather.out = AsMatrix(gathered, width);
  gather.width = width;
  backend_->GatherRows(gather);
  for (size_t r = 0; r < indices.size(); ++r) {
    for (int i = 0; i < width; ++i) {
      ASSERT_EQ(gathered[r * width + i], gate[indices[r] * width + i]);
    }
  }
}

TEST_P(ElementwiseTest, CopyBlocksKeepsTheOrderOfCopies) {
  const int tokens = 3;
  std::vector<float> k = RandomVector(6 * tokens * 5, 6);
  std::vector<float> v = RandomVector(6 * tokens * 7, 7);
  const std::vector<float> k_before = k, v_before = v;
  BlockCopyArgs args;
  args.cache = {.k = k.data(), .v = v.data(), .block_count = 6, .k_width = 5, .v_width = 7};
  args.block_tokens = tokens;
  const std::vector<int32_t> source = {0, 3, 4}, target = {3, 5, 4};
  args.count = 3;
  args.source = source.data();
  args.target = target.data();
  backend_->CopyBlocks(args);
  // Block 3 was overwritten by 0 before it was copied to 5.
  const int from[6] = {0, 1, 2, 0, 4, 0};
  for (int b = 0; b < 6; ++b) {
    for (int i = 0; i < tokens * 5; ++i) {
      ASSERT_EQ(k[b * tokens * 5 + i], k_before[from[b] * tokens * 5 + i]);
    }
    for (int i = 0; i < tokens * 7; ++i) {
      ASSERT_EQ(v[b * tokens * 7 + i], v_before[from[b] * tokens * 7 + i]);
    }
  }
}

TEST_P(ElementwiseTest, RopeRotatesOnlyItsDimensions) {
  const int rows = 4, heads = 3, half = 5, stride = 16, offset = 2;
  const std::vector<int32_t> positions = {0, 1, 77, 4000};
  const std::vector<float> inv_freq = {1.0f, 0.5f, 0.1f, 0.01f, 0.001f};
  const float factor = 1.25f;
  std::vector<float> angles(rows * 2 * half);
  backend_->RopeAngles({.rows = {.bound = rows},
                        .positions = positions.data(),
                        .inv_freq = inv_freq.data(),
                        .half = half,
                        .factor = factor,
                        .out = AsMatrix(angles, 2 * half)});
  for (const bool interleaved : {false, true}) {
    const std::vector<float> x = RandomVector(rows * heads * stride, 8);
    std::vector<float> y = x;
    RopeArgs args;
    args.rows.bound = rows;
    args.x = AsMatrix(y, heads * stride);
    args.heads = heads;
    args.head_stride = stride;
    args.offset = offset;
    args.half = half;
    args.interleaved = interleaved;
    args.angles = AsMatrix(angles, 2 * half);
    backend_->Rope(args);
    std::vector<double> expected(x.begin(), x.end());
    for (int r = 0; r < rows; ++r) {
      for (int h = 0; h < heads; ++h) {
        for (int j = 0; j < half; ++j) {
          const double angle = positions[r] * inv_freq[j];
          const double c = std::cos(angle) * factor, s = std::sin(angle) * factor;
          const size_t base = r * heads * stride + h * stride + offset;
          const size_t a = base + (interleaved ? 2 * j : j);
          const size_t b = interleaved ? a + 1 : a + half;
          expected[a] = x[a] * c - x[b] * s;
          expected[b] = x[b] * c + x[a] * s;
        }
      }
    }
    ExpectClose(y, expected, 3e-7);
  }
}

TEST(CpuBackend, AllocatesZeroedAlignedMemory) {
  auto backend = MakeBackend({.threads = 2});
  for (const size_t bytes : {0u, 1u, 1000u, 3u << 20}) {
    auto memory = backend->Allocate(bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*memory) % 64, 0u);
    for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(static_cast<unsigned char*>(*memory)[i], 0);
  }
  EXPECT_EQ(backend->Allocate(size_t{1} << 62).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace tandem::gpu
