#include <algorithm>
#include <cmath>

#include "common/tensor/convert.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

struct Problem {
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 16;
  int tokens = 50;
  int window = 0;
  bool sinks = false;
  int block_tokens = 16;
  DType dtype = DType::kF32;

  std::vector<float> q, k, v, sink;

  explicit Problem(int h = 4, int kv = 2, int d = 16, int t = 50)
      : heads(h), kv_heads(kv), head_dim(d), tokens(t) {
    q = RandomVector(static_cast<size_t>(t) * h * d, 1, 2.0f);
    k = RandomVector(static_cast<size_t>(t) * kv * d, 2);
    v = RandomVector(static_cast<size_t>(t) * kv * d, 3);
    sink = RandomVector(static_cast<size_t>(h), 4);
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  TestCache MakeCache(Backend& backend) const {
    TestCache cache({.sequences = 3,
                     .blocks_per_sequence = tokens / block_tokens + 1,
                     .block_tokens = block_tokens,
                     .k_width = kv_heads * head_dim,
                     .v_width = kv_heads * head_dim,
                     .dtype = dtype},
                    5);
    cache.Fill(backend, 1, k, v, tokens);
    return cache;
  }
};

std::vector<double> Reference(const Problem& p) {
  std::vector<double> out(p.q.size());
  const int width = p.kv_heads * p.head_dim;
  for (int t = 0; t < p.tokens; ++t) {
    for (int h = 0; h < p.heads; ++h) {
      const int kv = h / (p.heads / p.kv_heads);
      const int first = p.window > 0 ? std::max(0, t + 1 - p.window) : 0;
      std::vector<double> s;
      double max = p.sinks ? double{p.sink[h]} : -1e300;
      for (int j = first; j <= t; ++j) {
        double dot = 0;
        for (int d = 0; d < p.head_dim; ++d) {
          dot += double{p.q[(t * p.heads + h) * p.head_dim + d]} *
                 p.k[j * width + kv * p.head_dim + d];
        }
        s.push_back(dot * p.scale());
        max = std::max(max, s.back());
      }
      double sum = p.sinks ? std::exp(double{p.sink[h]} - max) : 0.0;
      for (double& x : s) sum += x = std::exp(x - max);
      for (int d = 0; d < p.head_dim; ++d) {
        double& y = out[(t * p.heads + h) * p.head_dim + d];
        for (int j = first; j <= t; ++j) {
          y += s[j - first] / sum * p.v[j * width + kv * p.head_dim + d];
        }
      }
    }
  }
  return out;
}

// Rows [begin, end) of the sequence in one call.
std::vector<float> Attend(Backend& backend, TestCache& cache, const Problem& p, int begin,
                          int end) {
  const int64_t ld = p.heads * p.head_dim;
  std::vector<float> out(static_cast<size_t>((end - begin) * ld), -1.0f);
  std::vector<int32_t> positions;
  for (int t = begin; t < end; ++t) positions.push_back(t);
  AttentionArgs args;
  args.rows.bound = end - begin;
  args.place = cache.Place(std::vector<int32_t>(positions.size(), 1), positions);
  args.cache = cache.cache();
  args.q = ConstMatrix(p.q.data() + begin * ld, ld);
  args.out = AsMatrix(out, ld);
  args.heads = p.heads;
  args.kv_heads = p.kv_heads;
  args.head_dim = p.head_dim;
  args.scale = p.scale();
  args.window_tokens = p.window;
  args.sinks = p.sinks ? p.sink.data() : nullptr;
  backend.Attention(args);
  return out;
}

class AttentionTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, AttentionTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

TEST_P(AttentionTest, MatchesTheReferenceOverOddShapes) {
  struct Shape {
    int heads, kv_heads, head_dim, tokens, window;
    bool sinks;
    int block_tokens;
  };
  for (const Shape& s : {Shape{1, 1, 8, 1, 0, false, 16}, Shape{4, 4, 24, 37, 0, false, 16},
                         Shape{6, 2, 17, 60, 0, true, 7}, Shape{8, 1, 64, 70, 9, true, 16},
                         Shape{40, 2, 32, 21, 0, false, 32}, Shape{4, 2, 16, 200, 64, false, 1},
                         Shape{2, 1, 16, 250, 3, true, 300}}) {
    Problem p(s.heads, s.kv_heads, s.head_dim, s.tokens);
    p.window = s.window;
    p.sinks = s.sinks;
    p.block_tokens = s.block_tokens;
    TestCache cache = p.MakeCache(*backend_);
    ExpectClose(Attend(*backend_, cache, p, 0, p.tokens), Reference(p), 2e-6);
  }
}

TEST_P(AttentionTest, ReadsABf16Cache) {
  Problem p(6, 3, 40, 33);
  p.dtype = DType::kBF16;
  TestCache cache = p.MakeCache(*backend_);
  for (float& x : p.k) x = Bf16ToF32(F32ToBf16(x));
  for (float& x : p.v) x = Bf16ToF32(F32ToBf16(x));
  ExpectClose(Attend(*backend_, cache, p, 0, p.tokens), Reference(p), 2e-6);
}

TEST_P(AttentionTest, ChunksThreadsBlocksAndInstructionSetsGiveTheSameBits) {
  auto ref = MakeBackend({1, Isa::kRef});
  for (const int window : {0, 50}) {
    Problem p(4, 2, 20, 256);
    p.window = window;
    p.sinks = window > 0;
    TestCache ref_cache = p.MakeCache(*ref);
    const std::vector<float> expected = Attend(*ref, ref_cache, p, 0, p.tokens);
    p.block_tokens = 48;
    TestCache cache = p.MakeCache(*backend_);
    for (const int chunk : {1, 5, 100, 256}) {
      std::vector<float> out;
      for (int begin = 0; begin < p.tokens; begin += chunk) {
        const std::vector<float> part =
            Attend(*backend_, cache, p, begin, std::min(begin + chunk, p.tokens));
        out.insert(out.end(), part.begin(), part.end());
      }
      ExpectSameBits(out, expected);
    }
  }
}

TEST_P(AttentionTest, CrossesSoftmaxBlocksWithinTolerance) {
  // 600 keys are three blocks; the largest score moves from block to block.
  Problem p(2, 1, 16, 600);
  for (int t = 0; t < p.tokens; ++t) {
    for (int d = 0; d < 16; ++d) p.k[t * 16 + d] *= 1.0f + 0.01f * static_cast<float>(t % 410);
  }
  TestCache cache(
      {.sequences = 2, .blocks_per_sequence = 40, .block_tokens = 16, .k_width = 16, .v_width = 16},
      6);
  // In steps that fit the backend's row limit.
  for (int begin = 0; begin < p.tokens; begin += 200) {
    std::vector<int32_t> positions;
    for (int t = begin; t < begin + 200; ++t) positions.push_back(t);
    CacheWriteArgs write;
    write.rows.bound = 200;
    write.place = cache.Place(std::vector<int32_t>(200, 1), positions);
    write.k = ConstMatrix(p.k.data() + begin * 16, 16);
    write.v = ConstMatrix(p.v.data() + begin * 16, 16);
    write.cache = cache.cache();
    backend_->CacheWrite(write);
  }
  const std::vector<double> all = Reference(p);
  const std::vector<float> out = Attend(*backend_, cache, p, 400, 600);
  ExpectClose(out, std::vector<double>(all.begin() + 400 * 32, all.end()), 3e-6);
}

TEST_P(AttentionTest, ANanRowLeavesItsNeighboursAlone) {
  Problem p(4, 2, 16, 20);
  TestCache cache = p.MakeCache(*backend_);
  const std::vector<float> clean = Attend(*backend_, cache, p, 0, p.tokens);
  // The newest token of the sequence is not finite: rows before it do not see it.
  Problem bad = p;
  std::fill_n(bad.k.begin() + 19 * 32, 32, std::nanf(""));
  std::fill_n(bad.v.begin() + 19 * 32, 32, std::nanf(""));
  TestCache bad_cache = bad.MakeCache(*backend_);
  const std::vector<float> out = Attend(*backend_, bad_cache, bad, 0, p.tokens);
  ExpectSameBits({out.begin(), out.begin() + 19 * 64}, {clean.begin(), clean.begin() + 19 * 64});
  for (size_t i = 19 * 64; i < out.size(); ++i) EXPECT_TRUE(std::isnan(out[i]));
}

TEST_P(AttentionTest, MixesSequencesAndChunksInOneStep) {
  const Problem p(4, 2, 16, 40);
  const Problem other(4, 2, 16, 30);
  TestCache cache = p.MakeCache(*backend_);
  const std::vector<float> alone = Attend(*backend_, cache, p, 0, p.tokens);
  std::vector<float> other_v = other.v;
  std::reverse(other_v.begin(), other_v.end());
  cache.Fill(*backend_, 2, other.k, other_v, other.tokens);
  // Rows: decode of sequence 2, a chunk of sequence 1, decode of sequence 2 at another position.
  const std::vector<int32_t> sequences = {2, 1, 1, 1, 2};
  const std::vector<int32_t> positions = {29, 10, 11, 12, 13};
  std::vector<float> q, out(5 * 64);
  for (const int32_t t : positions)
    q.insert(q.end(), p.q.begin() + t * 64, p.q.begin() + t * 64 + 64);
  AttentionArgs args;
  args.rows.bound = 5;
  args.place = cache.Place(sequences, positions);
  args.cache = cache.cache();
  args.q = AsMatrix(q, 64);
  args.out = AsMatrix(out, 64);
  args.heads = 4;
  args.kv_heads = 2;
  args.head_dim = 16;
  args.scale = p.scale();
  backend_->Attention(args);
  ExpectSameBits({out.begin() + 64, out.begin() + 4 * 64},
                 {alone.begin() + 10 * 64, alone.begin() + 13 * 64});
}

}  // namespace
}  // namespace tandem::gpu
