#include <cmath>
#include <numeric>

#include "common/tensor/convert.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

struct Problem {
  int heads, latent, rope, tokens;
  std::vector<float> q_latent, q_rope, rows;

  Problem(int h, int l, int r, int t)
      : heads(h),
        latent(l),
        rope(r),
        tokens(t),
        q_latent(RandomVector(static_cast<size_t>(t * h * l), 1)),
        q_rope(RandomVector(static_cast<size_t>(t * h * (r + 3)), 2)),
        rows(RandomVector(static_cast<size_t>(t * (l + r)), 3)) {}
};

std::vector<double> Reference(const Problem& p, float scale) {
  std::vector<double> out(p.q_latent.size());
  const int width = p.latent + p.rope;
  for (int t = 0; t < p.tokens; ++t) {
    for (int h = 0; h < p.heads; ++h) {
      std::vector<double> s;
      double max = -1e300, sum = 0;
      for (int j = 0; j <= t; ++j) {
        double dot = 0;
        for (int d = 0; d < p.latent; ++d) {
          dot += double{p.q_latent[(t * p.heads + h) * p.latent + d]} * p.rows[j * width + d];
        }
        for (int d = 0; d < p.rope; ++d) {
          dot += double{p.q_rope[(t * p.heads + h) * (p.rope + 3) + d]} *
                 p.rows[j * width + p.latent + d];
        }
        s.push_back(dot * scale);
        max = std::max(max, s.back());
      }
      for (double& x : s) sum += x = std::exp(x - max);
      for (int d = 0; d < p.latent; ++d) {
        for (int j = 0; j <= t; ++j) {
          out[(t * p.heads + h) * p.latent + d] += s[j] / sum * p.rows[j * width + d];
        }
      }
    }
  }
  return out;
}

TestCache MakeCache(Backend& backend, const Problem& p, DType dtype) {
  TestCache cache({.sequences = 2,
                   .blocks_per_sequence = p.tokens / 8 + 1,
                   .block_tokens = 8,
                   .k_width = p.latent + p.rope,
                   .dtype = dtype},
                  4);
  cache.Fill(backend, 1, p.rows, {}, p.tokens);
  return cache;
}

std::vector<float> Attend(Backend& backend, TestCache& cache, const Problem& p, float scale,
                          int begin, int end) {
  const int64_t ld = p.heads * p.latent;
  const int64_t rope_ld = p.heads * (p.rope + 3);
  std::vector<float> out(static_cast<size_t>((end - begin) * ld));
  std::vector<int32_t> positions(static_cast<size_t>(end - begin));
  std::iota(positions.begin(), positions.end(), begin);
  LatentAttentionArgs args;
  args.rows.bound = end - begin;
  args.place = cache.Place(std::vector<int32_t>(positions.size(), 1), positions);
  args.cache = cache.cache();
  args.q_latent = ConstMatrix(p.q_latent.data() + begin * ld, ld);
  args.q_rope = ConstMatrix(p.q_rope.data() + begin * rope_ld, rope_ld);
  args.q_rope_head_stride = p.rope + 3;
  args.out = AsMatrix(out, ld);
  args.heads = p.heads;
  args.latent_dim = p.latent;
  args.rope_dim = p.rope;
  args.scale = scale;
  backend.LatentAttention(args);
  return out;
}

class LatentAttentionTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, LatentAttentionTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

TEST_P(LatentAttentionTest, MatchesTheReferenceOverOddShapes) {
  for (const Problem& p : {Problem(1, 8, 4, 3), Problem(5, 33, 7, 40), Problem(70, 48, 16, 12),
                           Problem(3, 100, 24, 90)}) {
    TestCache cache = MakeCache(*backend_, p, DType::kF32);
    ExpectClose(Attend(*backend_, cache, p, 0.2f, 0, p.tokens), Reference(p, 0.2f), 2e-6);
  }
}

TEST_P(LatentAttentionTest, ReadsABf16Cache) {
  Problem p(6, 40, 8, 25);
  TestCache cache = MakeCache(*backend_, p, DType::kBF16);
  for (float& x : p.rows) x = Bf16ToF32(F32ToBf16(x));
  ExpectClose(Attend(*backend_, cache, p, 0.2f, 0, p.tokens), Reference(p, 0.2f), 2e-6);
}

TEST_P(LatentAttentionTest, ChunksThreadsAndInstructionSetsGiveTheSameBits) {
  auto ref = MakeBackend({1, Isa::kRef});
  const Problem p(34, 24, 8, 60);
  TestCache ref_cache = MakeCache(*ref, p, DType::kF32);
  const std::vector<float> expected = Attend(*ref, ref_cache, p, 0.3f, 0, p.tokens);
  TestCache cache = MakeCache(*backend_, p, DType::kF32);
  for (const int chunk : {1, 7, 60}) {
    std::vector<float> out;
    for (int begin = 0; begin < p.tokens; begin += chunk) {
      const auto part = Attend(*backend_, cache, p, 0.3f, begin, std::min(begin + chunk, p.tokens));
      out.insert(out.end(), part.begin(), part.end());
    }
    ExpectSameBits(out, expected);
  }
}

}  // namespace
}  // namespace tandem::gpu
